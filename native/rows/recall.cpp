// Whole rows, bit for bit: scans for checkpoints, restoring, the two ways between memory and disk.
#include <algorithm>

#include "group.hpp"

namespace ray_pipe::rows {

// A record: flags 2, zero 2, accumulator 4, then the payload of the alive chunks, then zeros.
size_t record_bytes(const Table& table) {
  return 8 + table.payload_bytes(static_cast<int>(table.config.chunks));
}

void to_record(const Table& table, const Version* v, char* record) {
  std::memset(record, 0, record_bytes(table));
  const uint16_t flags = v->flags() & (kAlive | kSpilled);
  std::memcpy(record, &flags, 2);
  std::memcpy(record + 4, &v->accumulator, 4);
  if (!v->spilled())
    std::memcpy(record + 8, v->payload(), table.payload_bytes(__builtin_popcount(v->alive())));
  else
    std::memset(record + 4, 0, 4);
}

namespace {
void from_record(const Table& table, const char* record, int64_t key, Version* fresh) {
  uint16_t flags;
  std::memcpy(&flags, record, 2);
  fresh->set(0, flags & kAlive);
  fresh->next = nullptr;
  fresh->key = key;
  std::memcpy(&fresh->accumulator, record + 4, 4);
  fresh->recency.store(kNoRecency, std::memory_order_relaxed);
  std::memcpy(fresh->payload(), record + 8,
              table.payload_bytes(__builtin_popcount(fresh->alive())));
}

void touch_all(Store& store, Worker& worker, Table& table, const int64_t* keys, size_t n,
               const uint64_t* touched = nullptr) {
  if (!table.config.lru) return;
  const Batch scope(store, worker);
  const std::lock_guard lock(table.recency.mutex);
  for (size_t i = 0; i < n; ++i) {
    if (touched) table.recency.mark(touched[i] >> kWithinStep);
    const uint64_t hash = table.hash(keys[i]);
    if (Word* slot = table.find(hash, keys[i])) touch(table, hash, keys[i], slot);
  }
}
}  // namespace

ScanResult scan(Store& store, Table& table, const SnapshotEntry* snapshot, uint64_t cursor,
                size_t limit, int64_t* keys, uint64_t* stamps, uint32_t* recency, char* records) {
  const Borrowed worker(store);
  const Batch scope(store, *worker, snapshot);
  const size_t bytes = record_bytes(table);
  std::vector<RowAt> rows;
  ScanResult result;
  result.cursor = cursor;
  result.done = !collect(table, scope.snapshot(), result.cursor, limit + 1, rows);
  result.count = std::min(limit, rows.size());
  if (rows.size() > limit) {
    result.cursor = rows[limit].hash;
    result.done = false;
  }
  for (size_t i = 0; i < result.count; ++i) {
    const Version* row = rows[i].row;
    keys[i] = row->key;
    stamps[i] = row->spilled() ? row->disk_stamp() : row->stamp();
    recency[i] = row->spilled() ? 0 : row->recency.load();
    to_record(table, row, records + i * bytes);
  }
  return result;
}

size_t restore(Store& store, Table& table, const int64_t* keys, const char* records, size_t n,
               const uint64_t* touched) {
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  const size_t bytes = record_bytes(table);
  size_t refused = 0;
  const auto write = [&](size_t from, size_t here) {
    return grouped(store, worker, table, keys + from, here, [&](Txn& txn, Get& get, size_t i) {
      const char* record = records + (from + i) * bytes;
      if (Version* fresh = txn.write(get, static_cast<uint8_t>(record[0])))
        from_record(table, record, keys[from + i], fresh);
    });
  };
  for (size_t from = 0; from < n; from += kGroup) {
    const size_t here = std::min(kGroup, n - from);
    if (write(from, here) != Status::ok)
      for (size_t i = from; i < from + here; ++i) refused += write(i, 1) != Status::ok;
    touch_all(store, worker, table, keys + from, here, touched ? touched + from : nullptr);
  }
  return refused;
}

size_t remove(Store& store, Table& table, const int64_t* keys, size_t n) {
  const Borrowed worker(store);
  size_t removed = 0;
  for (size_t from = 0; from < n; from += kGroup) {
    size_t now = 0;
    const Status status = grouped(store, *worker, table, keys + from, std::min(kGroup, n - from),
                                  [&](Txn& txn, Get& get, size_t i) {
                                    if (i == 0) now = 0;
                                    now += get.found.row && txn.write_header(get, kTombstone);
                                  });
    if (status == Status::ok) removed += now;
  }
  tidy(store, *worker, true);
  return removed;
}

// --- spill ----------------------------------------------------------------------------------------

size_t mark_spilled(Store& store, Table& table, const int64_t* keys, const uint64_t* stamps,
                    size_t n) {
  const Borrowed worker(store);
  size_t marked = 0;
  for (size_t from = 0; from < n; from += kGroup) {
    size_t now = 0;
    const Status status = grouped(
        store, *worker, table, keys + from, std::min(kGroup, n - from),
        [&](Txn& txn, Get& get, size_t i) {
          if (i == 0) now = 0;
          const Version* row = get.found.row;
          if (!row || row->spilled() || row->stamp() != stamps[from + i]) return;  // changed since
          if (Version* fresh = txn.write_header(get, kSpilled)) {
            fresh->set_disk_stamp(stamps[from + i]);
            ++now;
          }
        },
        false);
    if (status == Status::ok) marked += now;
  }
  tidy(store, *worker, true);
  return marked;
}

size_t recall(Store& store, Table& table, const int64_t* keys, const uint64_t* stamps,
              const char* records, size_t n, uint8_t* done) {
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  const size_t bytes = record_bytes(table);
  size_t recalled = 0;
  for (size_t i = 0; i < n; ++i) {
    bool wrote = false;
    const Status status =
        grouped(store, worker, table, keys + i, 1, [&](Txn& txn, Get& get, size_t) {
          const char* record = records + i * bytes;
          const Version* row = get.found.row;
          wrote = false;
          if (!row || !row->spilled() || row->disk_stamp() != stamps[i]) return;
          get.found.row = nullptr;  // memory is taken as for an insert, not from the reserve
          if (Version* fresh = txn.write(get, static_cast<uint8_t>(record[0]))) {
            from_record(table, record, keys[i], fresh);
            wrote = true;
          }
        });
    done[i] = status == Status::ok;
    if (status == Status::ok && wrote) {
      ++recalled;
      touch_all(store, worker, table, keys + i, 1);
    }
  }
  return recalled;
}

void stamps_of(Store& store, Table& table, const int64_t* keys, size_t n,
               const SnapshotEntry* snapshot, uint64_t* stamps, uint64_t* on_disk) {
  const Borrowed worker(store);
  const Batch scope(store, *worker, snapshot);
  Txn txn(store, *worker);
  txn.begin(scope.snapshot());
  for (size_t i = 0; i < n; ++i) {
    Get get(txn, table, keys[i], false);
    while (!get.step()) {
    }
    const Version* row = get.found.row;
    stamps[i] = row ? row->stamp() : 0;
    on_disk[i] = row && row->spilled() ? row->disk_stamp() : 0;
  }
}

void alive_of(Store& store, Table& table, const int64_t* keys, size_t n, uint8_t* alive) {
  const Borrowed worker(store);
  const Batch scope(store, *worker, nullptr);
  Txn txn(store, *worker);
  txn.begin(scope.snapshot());
  for (size_t i = 0; i < n; ++i) {
    Get get(txn, table, keys[i], false);
    while (!get.step()) {
    }
    const Version* row = get.found.row;
    alive[i] = row && !row->spilled() ? row->alive() : 0;
  }
}

}  // namespace ray_pipe::rows
