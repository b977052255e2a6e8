// A transaction: reads of one snapshot, staged writes, an optimistic commit.
//
// Serialisable: a commit takes its stamp first, then checks that everything it read is still the
// newest. Reads alone never fail. A read is a small state machine (`Get`) that asks for a cache line
// and says whether it is ready, so that a coroutine, a group or a plain loop can drive it.
#pragma once

#include <vector>

#include "store.hpp"

namespace ray_pipe::rows {

class Txn;

// Where a key is, and what a transaction sees of it.
struct Found {
  Word* slot = nullptr;         // nullptr: the key has no slot
  const Version* row = nullptr;  // nullptr: absent. A spilled row is a version without payload
};

class Get {
 public:
  Get() = default;
  Get(Txn& txn, Table& table, int64_t key, bool recorded = true);

  // Does what can be done with the lines at hand. True: ready, see `found`.
  bool step();
  Found found;
  uint64_t hash() const { return hash_; }
  int64_t key() const { return key_; }
  Table& table() const { return *table_; }

 private:
  friend class Txn;
  bool bucket_step();
  bool version_step();
  bool next_bucket(uint64_t header);

  enum class State : uint8_t { bucket, version, older } state_ = State::bucket;
  bool recorded_ = true;
  uint32_t bucket_ = 0, probes_ = 0, candidates_ = 0;
  Txn* txn_ = nullptr;
  Table* table_ = nullptr;
  Segment* segment_ = nullptr;
  int64_t key_ = 0;
  uint64_t hash_ = 0, word_ = 0, home_header_ = 0;
  Version* version_ = nullptr;
};

class Txn {
 public:
  Txn(Store& store, Worker& worker) : store_(store), worker_(worker) {}
  ~Txn() { abandon(); }
  Txn(const Txn&) = delete;
  Txn& operator=(const Txn&) = delete;

  void begin(uint64_t snapshot);
  Get get(Table& table, int64_t key) { return Get(*this, table, key); }

  // Stages a version of `alive` chunks for the row that `get` found or missed, and returns it to be
  // filled. nullptr: no room, see `trouble`. A row that was staged before is replaced.
  Version* write(Get& get, uint8_t alive);
  // Stages a header alone: a tombstone or a marker of a spilled row.
  Version* write_header(Get& get, uint16_t flags);

  // Sees what an earlier operation of this transaction staged for the same row.
  void refresh(Get& get);

  // Ok or conflict. What was staged is installed or gone.
  Status commit();
  void abandon();

  Store& store() const { return store_; }
  Worker& worker() const { return worker_; }
  uint64_t snapshot() const { return snapshot_; }
  uint64_t stamp = 0;  // of the commit; of the snapshot as long as nothing was written
  Status trouble = Status::ok;
  uint64_t trouble_hash = 0;       // of the key that found no slot,
  uint32_t trouble_buckets = 0;    // when its segment had this many buckets
  Table* trouble_table = nullptr;
  int trouble_class = 0;           // of the cell that was not to be had
  bool trouble_insert = true;
  std::vector<float> scratch;  // one lane's own
  bool inlined = true;  // reads run at once, without suspending
  Get* waiting = nullptr;

 private:
  friend class Get;
  struct Read {
    Word* word;
    uint64_t value;
  };
  struct Write {
    Word* slot;
    Version* fresh;
    Table* table;
    int64_t key;
    uint64_t locked;  // the word that the lock replaced
  };
  Version* stage(Get& get, int size_class);
  bool insert(Get& get);
  bool lock_writes();
  bool validate() const;
  void unlock(size_t n);
  bool owns(const Word* slot) const;
  Write* staged(const Word* slot, int64_t key);
  void account(const Write& write) const;

  Store& store_;
  Worker& worker_;
  uint64_t snapshot_ = 0;
  bool doomed_ = false;  // read something that was not the newest: it may not write
  std::vector<Read> reads_, headers_;
  std::vector<Write> writes_;
};

}  // namespace ray_pipe::rows
