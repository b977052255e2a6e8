// One transaction over a group of keys that are known ahead: all lines are asked for, then used.
//
// What `apply`, inserts, pruning, eviction and recall are made of; the coroutines of lanes.hpp are
// for keys that are not known ahead.
#pragma once

#include <new>

#include "lanes.hpp"

namespace ray_pipe::rows {

constexpr size_t kGroup = 64;

// Calls body(txn, get, i) for each key on one snapshot and commits; again from the start after a
// conflict. The body stages writes and returns nothing; it may run several times. Ok, or full: then
// nothing of this group was done.
template <class Action>
Status grouped(Store& store, Worker& worker, Table& table, const int64_t* keys, size_t n,
               Action&& body, bool may_make_room = true, uint64_t* stamp = nullptr) {
  Txn txn(store, worker);
  Get gets[kGroup];
  for (int attempts = 0, rooms = 0; attempts < kAttempts; ++attempts) {
    back_off(attempts);
    Status status = Status::ok;
    {
      const Batch scope(store, worker);
      txn.begin(scope.snapshot());
      for (size_t i = 0; i < n; ++i) gets[i] = Get(txn, table, keys[i]);
      uint64_t waiting = n == kGroup ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
      while (waiting)
        for (uint64_t left = waiting; left; left &= left - 1) {
          const int i = __builtin_ctzll(left);
          if (gets[i].step()) waiting &= ~(uint64_t{1} << i);
        }
      try {
        for (size_t i = 0; i < n && txn.trouble == Status::ok; ++i) {
          txn.refresh(gets[i]);
          body(txn, gets[i], i);
        }
        status = txn.trouble == Status::ok ? txn.commit() : txn.trouble;
      } catch (const std::bad_alloc&) {
        txn.abandon();
        return Status::full;
      }
      if (status == Status::conflict) bump(worker.counters.conflicts);
      else if (status != Status::ok) txn.abandon();
    }
    tidy(store, worker);
    if (stamp) *stamp = txn.stamp;
    if (status == Status::ok) return status;
    if (status == Status::conflict) continue;
    if (!may_make_room || !make_room(store, worker, txn, rooms++)) {
      bump(worker.counters.full);
      return Status::full;
    }
    --attempts;
  }
  return Status::conflict;
}

// --- what works on whole arrays (bulk.cpp, recall.cpp, prune.cpp) -------------------------------------

enum class Seen : uint8_t { absent = 0, present = 1, spilled = 2 };

// Rows of one snapshot, `group` lines under way at a time (1: one after the other). Absent rows are
// zeros. Returns how many are spilled.
size_t multi_get(Store& store, Table& table, const int64_t* keys, size_t n, float* out,
                 uint8_t* seen, const SnapshotEntry* snapshot, size_t group);

struct LookupResult {
  uint64_t inserted = 0, evicted = 0, full = 0, spilled = 0;
};
// Reads for training: touches rows that are there, then inserts those that are not, in call order.
// `step` is what the order of use remembers of them; it never falls.
LookupResult lookup(Store& store, Table& table, const int64_t* keys, size_t n, float* out,
                    uint8_t* seen, uint64_t step = 0);

struct ApplyResult {
  uint64_t applied = 0, absent = 0, spilled = 0, full = 0;
};
// One optimizer step on the rows that are there. `counts` may be null: one each.
ApplyResult apply(Store& store, Table& table, const int64_t* keys, size_t n, const float* gradients,
                  double lr, const float* counts, uint8_t* seen);

struct RowAt {
  uint64_t hash;
  const Version* row;
};
// Collects rows from `cursor` on, in order of hashes, until there are enough; false at the end.
bool collect(Table& table, uint64_t snapshot, uint64_t& cursor, size_t at_least,
             std::vector<RowAt>& rows);

// Whole rows in and out, as records: flags, accumulator, payload.
size_t record_bytes(const Table& table);
void to_record(const Table& table, const Version* v, char* record);
struct ScanResult {
  uint64_t count = 0, cursor = 0;
  bool done = false;
};
ScanResult scan(Store& store, Table& table, const SnapshotEntry* snapshot, uint64_t cursor,
                size_t limit, int64_t* keys, uint64_t* stamps, uint32_t* recency, char* records);
// Writes records as they are, touching them in this order. `touched` may be null, or what `order`
// told of each. Returns how many found no room.
size_t restore(Store& store, Table& table, const int64_t* keys, const char* records, size_t n,
               const uint64_t* touched = nullptr);
size_t remove(Store& store, Table& table, const int64_t* keys, size_t n);

// Spill: the rows to go next, then a marker for those that have not changed since, then back.
size_t oldest(Store& store, Table& table, size_t limit, int64_t* keys, uint64_t* stamps,
              char* records);
size_t mark_spilled(Store& store, Table& table, const int64_t* keys, const uint64_t* stamps,
                    size_t n);
size_t recall(Store& store, Table& table, const int64_t* keys, const uint64_t* stamps,
              const char* records, size_t n, uint8_t* done);
// Stamps of the versions that a snapshot sees (0: absent), and what spilled rows are called on disk.
void stamps_of(Store& store, Table& table, const int64_t* keys, size_t n,
               const SnapshotEntry* snapshot, uint64_t* stamps, uint64_t* on_disk);
// Which chunks rows have now, as bits; 0 for rows that are absent or spilled.
void alive_of(Store& store, Table& table, const int64_t* keys, size_t n, uint8_t* alive);

// Evicts up to `n` of the rows that were touched longest ago, none touched at or after `before`.
size_t evict(Store& store, Worker& worker, Table& table, size_t n, uint64_t before);
// The recency of a row is now. Wants the lock and an open batch.
void touch(Table& table, uint64_t hash, int64_t key, Word* slot);
void shorten_queue(Table& table);
// Keys of the rows in memory, longest unused first, each with its step and its place in that step.
constexpr int kWithinStep = 24;
size_t order(Store& store, Table& table, size_t limit, int64_t* keys, uint64_t* touched);

struct PruneResult {
  uint64_t rows = 0, pruned = 0, regrown = 0, dropped = 0, alive = 0;
};
// `weights`: of each column of chunks, by which utilities are multiplied before they are ranked; one
// line for each number of idle periods from 0 on, the last of the `ages` lines for all above.
PruneResult prune(Store& store, Table& table, uint64_t max_alive_chunks, const float* weights,
                  uint32_t ages = 1);
// Packs the rows of each size into as few slabs as hold them. Returns how many slabs were emptied.
size_t compact(Store& store);

}  // namespace ray_pipe::rows
