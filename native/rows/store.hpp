// The store: clocks, who reads what, the memory of versions, the gate for maintenance.
//
// `clock` hands out stamps; commits up to `visible` are installed; a snapshot is a value of
// `visible`. A call borrows a Worker; while it works its entry says which snapshot it reads, and
// nothing that this snapshot can reach is freed.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.hpp"

namespace ray_pipe::rows {

struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct SnapshotExpired : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory of coroutine frames: freed blocks by size, never returned before the worker ends.
class FramePool {
 public:
  void* take(size_t bytes);
  void give(void* frame, size_t bytes);
  ~FramePool();

 private:
  static constexpr size_t kStep = 64, kSizes = 32;
  std::vector<void*> free_[kSizes];
};

struct Counters {
  std::atomic<uint64_t> commits{0}, conflicts{0}, full{0}, pending{0}, resumes{0}, batches{0},
      probes{0}, evicted{0}, retries{0};
};
inline void bump(std::atomic<uint64_t>& n, uint64_t by = 1) {
  n.store(n.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);  // one writer
}

struct Retired {
  Version* version;
  uint64_t stamp;  // of the commit that replaced it
};
struct Dead {
  Table* table;
  int64_t key;
};

// What one thread at a time works with. Idle workers hold nothing back.
struct alignas(64) Worker {
  std::atomic<uint64_t> entry{kIdle};
  std::atomic<uint32_t> active{0};
  alignas(64) Counters counters;
  struct Cells {
    std::vector<Version*> free;  // an array: popping a linked list would miss
    char *bump = nullptr, *end = nullptr;
  };
  Cells cells[kMaxClasses];
  std::vector<Retired> retired;
  size_t retired_from = 0;
  std::atomic<uint64_t> retired_bytes{0};
  std::vector<Dead> dead;  // tombstones and placeholders whose slots are to be returned
  FramePool frames;
  uint32_t since_reclaim = 0;
  uint64_t evict_before = kIdle;  // rows touched later than this are not evicted to make room
};

struct SnapshotEntry {
  std::atomic<uint64_t> stamp{kIdle};
  std::atomic<bool> expired{false};
  bool taken = false;
};

struct StoreConfig {
  size_t capacity = size_t{1} << 30;
  size_t slab_bytes = size_t{2} << 20;
  bool huge = true;
  size_t snapshot_budget = 0;  // bytes of old versions a snapshot may pin; 0: a quarter
};

class Store {
 public:
  explicit Store(StoreConfig config);

  const StoreConfig config;
  Arena arena;
  alignas(64) std::atomic<uint64_t> clock{0};
  alignas(64) std::atomic<uint64_t> visible{0};

  Table& add_table(TableConfig table);
  const std::vector<std::unique_ptr<Table>>& tables() const { return tables_; }

  // --- workers and snapshots ----------------------------------------------------------------------
  Worker& borrow();
  void hand_back(Worker& worker);
  SnapshotEntry& open_snapshot();
  void close_snapshot(SnapshotEntry& snapshot);
  uint64_t horizon() const;

  // --- memory of versions -------------------------------------------------------------------------
  Version* allocate(Worker& worker, int size_class, bool insert);
  void release(Worker& worker, Version* version);
  void retire(Worker& worker, Version* version, uint64_t stamp);
  void reclaim(Worker& worker);
  void publish(uint64_t stamp);
  // Bytes of rows that evicting tables have too many if they get `more`: below their part of the
  // capacity an eighth stays free for the old versions that a snapshot holds, or every checkpoint
  // would end with the first rows after it. Wants an open batch.
  uint64_t over(uint64_t more) const;
  // Old versions that are not free yet.
  uint64_t retired_bytes() const;
  // The oldest snapshot ends, if it is of this stamp or older; whether there was one.
  bool expire_oldest(uint64_t limit);

  // --- maintenance (maintain.cpp) -------------------------------------------------------------------
  // Room in the segment of this key; false at the cap.
  bool grow(Worker& worker, Table& table, uint64_t hash, uint32_t seen_buckets);
  // Returns the slots of deleted keys. Wants an open batch.
  void sweep(Worker& worker);
  // Gathers what every worker could free, and a slab if that is not enough. False if there is no cell
  // of this class even so.
  bool scavenge(Worker& worker, int size_class, bool insert, size_t enough = 1);
  // Waits for those under way, frees what can be freed and gives slabs back that are empty then.
  void settle(Worker& worker);
  // Marks the emptiest slabs, as many as their rows find room elsewhere: rows in them are to be
  // rewritten, nothing new goes there, and the last row to leave frees the slab. Returns how many.
  size_t mark_sparse_slabs(Worker& worker);

  template <class Visit>
  void each_worker(Visit visit) const {
    const int n = num_workers_.load(std::memory_order_acquire);
    for (int i = 0; i < n; ++i) visit(*workers_[i]);
  }
  std::atomic<bool> gate{false};
  std::atomic<uint64_t> growths{0}, longest_pause_ns{0}, snapshots_expired{0};

 private:
  friend class Closed;
  friend struct Auditor;  // of the stress program
  static constexpr int kMaxWorkers = 128, kMaxSnapshots = 256;
  static constexpr uint64_t kHeadroom = 8;  // a part of the capacity
  void gather(Worker& worker);
  void give_back_empty(Worker& worker);
  bool take_shared(Worker& worker, int size_class);
  void share(Worker& worker, int size_class);

  std::vector<std::unique_ptr<Table>> tables_;
  std::unique_ptr<Worker> workers_[kMaxWorkers];
  std::atomic<int> num_workers_{0};
  std::vector<Worker*> idle_;
  // Free cells that a worker had too many of: one thread inserts, another deletes.
  struct Shared {
    std::atomic<size_t> size{0};
    std::vector<Version*> free;
  };
  Shared shared_[kMaxClasses];
  std::mutex shared_mutex_;
  SnapshotEntry snapshots_[kMaxSnapshots];
  std::atomic<int> num_snapshots_{0};  // entries ever used
  mutable std::mutex mutex_;          // of workers, snapshots and tables
  std::mutex maintenance_;            // held with the gate closed
};

// Borrows a worker for one call.
class Borrowed {
 public:
  explicit Borrowed(Store& store) : store_(store), worker_(store.borrow()) {}
  ~Borrowed() { store_.hand_back(worker_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Worker& operator*() const { return worker_; }

 private:
  Store& store_;
  Worker& worker_;
};

// A batch: passes the gate and registers a snapshot, until it ends.
class Batch {
 public:
  Batch(Store& store, Worker& worker, const SnapshotEntry* pinned = nullptr);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  uint64_t snapshot() const { return snapshot_; }

 private:
  Worker& worker_;
  uint64_t snapshot_;
};

// No batch is open while this lives.
class Closed {
 public:
  explicit Closed(Store& store);
  ~Closed();
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;

 private:
  Store& store_;
  std::unique_lock<std::mutex> lock_;
  uint64_t since_;
};

}  // namespace ray_pipe::rows
