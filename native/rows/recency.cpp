// Who was used last: touching, evicting, and the next rows to spill.
#include <algorithm>
#include <thread>

#include "group.hpp"

namespace ray_pipe::rows {

namespace {
// The row that an entry stands for, or nullptr if the entry is stale.
const Version* row_of(Table& table, uint64_t position) {
  const uint32_t number = table.recency.at(position);
  if (number == 0) return nullptr;
  const uint64_t word = table.slot_at(number)->load();
  if (!word) return nullptr;
  const Version* v = version_of(word);
  if (v->absent() || v->spilled()) return nullptr;
  return v->recency.load() == static_cast<uint32_t>(position) ? v : nullptr;
}

void prefetch_entry(Table& table, uint64_t position) {
  const Recency& queue = table.recency;
  if (position + 32 < queue.end()) prefetch(table.slot_at(queue.at(position + 32)));
  if (position + 16 < queue.end())
    prefetch(version_of(table.slot_at(queue.at(position + 16))->load(std::memory_order_relaxed)));
}
}  // namespace

void touch(Table& table, uint64_t hash, int64_t key, Word* slot) {
  Recency& queue = table.recency;
  if (static_cast<uint32_t>(queue.end()) == kNoRecency) queue.push(0);  // a position of nobody
  const auto position = static_cast<uint32_t>(queue.end());
  for (int spins = 0;; ++spins) {
    const uint64_t word = slot->load();
    if (word & kLock) {
      if (spins < 64) relax();
      else std::this_thread::yield();
      continue;
    }
    Version* v = version_of(word);
    if (!word || v->key != key || v->absent() || v->spilled()) return;
    v->recency.store(position);
    POINT();
    if (slot->load() == word) break;  // else a commit may have copied the older position
  }
  queue.push(table.slot_number(hash, slot));
}

void shorten_queue(Table& table) {
  Recency& queue = table.recency;
  if (queue.end() - queue.begin() <= 2 * table.rows.load() + 4096) return;
  for (const uint64_t end = queue.end(); queue.begin() < end; queue.pop()) {
    prefetch_entry(table, queue.begin());
    const Version* v = row_of(table, queue.begin());
    if (!v) continue;
    queue.mark(queue.step_at(queue.begin()));
    touch(table, table.hash(v->key), v->key, table.slot_at(queue.at(queue.begin())));
  }
  queue.mark(queue.newest_step());
}

size_t order(Store& store, Table& table, size_t limit, int64_t* keys, uint64_t* touched) {
  const Borrowed worker(store);
  const Batch scope(store, *worker);
  const std::lock_guard lock(table.recency.mutex);
  const Recency& queue = table.recency;
  size_t n = 0;
  uint64_t before = 0, within = 0;
  for (uint64_t p = queue.begin(); p < queue.end() && n < limit; ++p) {
    prefetch_entry(table, p);
    const Version* v = row_of(table, p);
    if (!v) continue;
    const uint64_t step = queue.step_at(p);
    within = n && step == before ? within + 1 : 0;
    before = step;
    keys[n] = v->key;
    touched[n++] = step << kWithinStep | std::min(within, (uint64_t{1} << kWithinStep) - 1);
  }
  return n;
}

size_t evict(Store& store, Worker& worker, Table& table, size_t n, uint64_t before) {
  const std::lock_guard turn(table.recency.evicting);
  std::vector<int64_t> victims;
  {
    const Batch scope(store, worker);
    const std::lock_guard lock(table.recency.mutex);
    Recency& queue = table.recency;
    while (queue.begin() < queue.end() && !row_of(table, queue.begin())) queue.pop();
    // They leave the queue as stale entries, once they are gone: a tombstone may find no memory.
    for (uint64_t p = queue.begin(); victims.size() < n && p < std::min(queue.end(), before); ++p) {
      prefetch_entry(table, p);
      if (const Version* v = row_of(table, p)) victims.push_back(v->key);
      if (MUTANT(popped_before_commit)) queue.pop();
    }
  }
  size_t gone = 0;
  for (size_t from = 0; from < victims.size(); from += kGroup) {
    const size_t here = std::min(kGroup, victims.size() - from);
    size_t now = 0;
    const auto drop = [&] {
      return grouped(
          store, worker, table, victims.data() + from, here,
          [&](Txn& txn, Get& get, size_t i) {
            if (i == 0) now = 0;
            now += get.found.row && txn.write_header(get, kTombstone);
          },
          false);
    };
    Status status = drop();
    if (status == Status::full) {  // in a full store the first that went make room for the others
      tidy(store, worker, true);
      status = drop();
    }
    if (status == Status::ok) gone += now;
  }
  bump(worker.counters.evicted, gone);
  tidy(store, worker, true);
  return gone;
}

size_t oldest(Store& store, Table& table, size_t limit, int64_t* keys, uint64_t* stamps,
              char* records) {
  const Borrowed worker(store);
  const Batch scope(store, *worker);
  const std::lock_guard lock(table.recency.mutex);
  const size_t bytes = record_bytes(table);
  size_t n = 0;
  Recency& queue = table.recency;
  while (queue.begin() < queue.end() && !row_of(table, queue.begin())) queue.pop();
  for (uint64_t p = queue.begin(); p < queue.end() && n < limit; ++p) {
    prefetch_entry(table, p);
    const Version* v = row_of(table, p);
    if (!v || v->stamp() > scope.snapshot()) continue;
    keys[n] = v->key;
    stamps[n] = v->stamp();
    to_record(table, v, records + n * bytes);
    ++n;
  }
  return n;
}

}  // namespace ray_pipe::rows
