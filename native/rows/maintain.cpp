// Maintenance: growth, slots that return, memory that returns.
#include <algorithm>

#include "group.hpp"

namespace ray_pipe::rows {

bool Store::grow(Worker& worker, Table& table, uint64_t hash, uint32_t seen_buckets) {
  const Closed closed(*this);
  const auto number = static_cast<uint32_t>(hash >> 58);
  if (table.segments[number].num_buckets > seen_buckets) return true;  // somebody was faster
  std::vector<Version*> dropped;
  const bool grown = table.resize(number, table.grown(number), horizon(), dropped);
  for (Version* v : dropped) release(worker, v);
  growths.fetch_add(grown);
  return grown;
}

void Store::sweep(Worker& worker) {
  if (worker.dead.empty()) return;
  const uint64_t limit = horizon();
  constexpr size_t kAtOnce = 64;
  struct Gone {
    Word* slot;
    uint64_t word;
    Segment* segment;
  };
  Gone gone[kAtOnce];
  std::vector<Dead> kept;
  kept.reserve(worker.dead.size());
  for (size_t i = 0; i < worker.dead.size();) {
    size_t n = 0;
    worker.retired.reserve(worker.retired.size() + kAtOnce);
    for (; i < worker.dead.size() && n < kAtOnce; ++i) {
      const Dead& d = worker.dead[i];
      const uint64_t hash = d.table->hash(d.key);
      Word* slot = d.table->find(hash, d.key);
      if (!slot) continue;
      uint64_t word = slot->load(std::memory_order_acquire);
      const Version* head = version_of(word);
      if (!word || head->key != d.key || !head->absent()) continue;
      if (head->stamp() > limit || (word & kLock) ||
          !slot->compare_exchange_strong(word, word | kLock))
        kept.push_back(d);
      else
        gone[n++] = {slot, word, &d.table->segment(hash)};
    }
    if (!n) continue;
    const uint64_t stamp = clock.fetch_add(1) + 1;
    for (size_t g = 0; g < n; ++g) {
      POINT();
      gone[g].slot->store(0);
    }
    publish(stamp);
    for (size_t g = 0; g < n; ++g) {
      gone[g].segment->release();
      retire(worker, version_of(gone[g].word), stamp);
    }
  }
  worker.dead.swap(kept);
}

// With the gate closed: everything that may be freed is, into the hands of this worker.
void Store::gather(Worker& worker) {
  each_worker([&](Worker& other) {
    sweep(other);
    reclaim(other);
    if (&other == &worker) return;
    for (int c = 0; c < arena.num_classes(); ++c) {
      auto &from = other.cells[c].free, &to = worker.cells[c].free;
      to.insert(to.end(), from.begin(), from.end());
      from.clear();
    }
  });
  const std::lock_guard lock(shared_mutex_);
  for (int c = 0; c < arena.num_classes(); ++c) {
    auto& from = shared_[c].free;
    worker.cells[c].free.insert(worker.cells[c].free.end(), from.begin(), from.end());
    from.clear();
    shared_[c].size.store(0, std::memory_order_relaxed);
  }
}

void Store::settle(Worker& worker) {
  const Closed closed(*this);
  gather(worker);
  give_back_empty(worker);
}

bool Store::scavenge(Worker& worker, int size_class, bool insert, size_t enough) {
  const Closed closed(*this);
  gather(worker);
  Worker::Cells& cells = worker.cells[size_class];
  if (cells.free.size() >= enough) return true;
  give_back_empty(worker);
  char* slab = arena.take_slab(size_class, !insert);
  if (!slab) return !cells.free.empty();
  for (size_t i = 0; i < arena.cells_per_slab(size_class); ++i)
    cells.free.push_back(reinterpret_cast<Version*>(slab + i * arena.cell_bytes(size_class)));
  return true;
}

// With the gate closed, after `gather`: slabs that have run empty.
void Store::give_back_empty(Worker& worker) {
  std::vector<uint32_t> free(arena.num_slabs(), 0);
  for (int c = 0; c < arena.num_classes(); ++c)
    for (const Version* v : worker.cells[c].free) ++free[arena.slab_of(v)];
  for (int c = 0; c < arena.num_classes(); ++c) {
    auto& cells = worker.cells[c].free;
    const size_t per_slab = arena.cells_per_slab(c);
    const auto empty = [&](const Version* v) { return free[arena.slab_of(v)] == per_slab; };
    std::vector<size_t> slabs;
    for (const Version* v : cells)
      if (empty(v)) slabs.push_back(arena.slab_of(v));
    cells.erase(std::remove_if(cells.begin(), cells.end(), empty), cells.end());
    std::sort(slabs.begin(), slabs.end());
    slabs.erase(std::unique(slabs.begin(), slabs.end()), slabs.end());
    for (const size_t slab : slabs) arena.give_back(slab);
  }
}

size_t Store::mark_sparse_slabs(Worker& worker) {
  const Closed closed(*this);
  gather(worker);
  std::vector<uint32_t> free(arena.num_slabs(), 0);
  for (int c = 0; c < arena.num_classes(); ++c)
    for (const Version* v : worker.cells[c].free) ++free[arena.slab_of(v)];
  each_worker([&](const Worker& w) {  // a slab that is still being cut is not sparse
    for (int c = 0; c < arena.num_classes(); ++c)
      if (w.cells[c].bump != w.cells[c].end) free[arena.slab_of(w.cells[c].bump)] = 0;
  });
  size_t marked = 0;
  for (int c = 0; c < arena.num_classes(); ++c) {
    const size_t per_slab = arena.cells_per_slab(c);
    auto& cells = worker.cells[c].free;
    std::vector<size_t> slabs;
    size_t unused = 0;
    for (const Version* v : cells)
      if (const size_t slab = arena.slab_of(v); free[slab]) slabs.push_back(slab), ++unused;
    std::sort(slabs.begin(), slabs.end());
    slabs.erase(std::unique(slabs.begin(), slabs.end()), slabs.end());
    // The emptiest go, as many as the free cells of all of them make up: what lives in them fits
    // into the others, so less than one slab stays unused.
    std::sort(slabs.begin(), slabs.end(),
              [&](size_t x, size_t y) { return free[x] != free[y] ? free[x] > free[y] : x < y; });
    slabs.resize(unused / per_slab);
    std::sort(slabs.begin(), slabs.end());
    const auto leaves = [&](const Version* v) {
      return std::binary_search(slabs.begin(), slabs.end(), arena.slab_of(v));
    };
    if (!slabs.empty()) cells.erase(std::remove_if(cells.begin(), cells.end(), leaves), cells.end());
    for (const size_t slab : slabs)
      arena.vacate(slab, static_cast<uint32_t>(per_slab - free[slab]));
    marked += slabs.size();
  }
  // Lists of free cells were as long as all that was pruned: eight bytes for each.
  each_worker([&](Worker& w) {
    for (int c = 0; c < arena.num_classes(); ++c) w.cells[c].free.shrink_to_fit();
    w.retired.shrink_to_fit();
  });
  const std::lock_guard lock(shared_mutex_);
  for (int c = 0; c < arena.num_classes(); ++c) shared_[c].free.shrink_to_fit();
  return marked;
}

// --- making room ----------------------------------------------------------------------------------

bool make_room(Store& store, Worker& worker, const Txn& txn, int tries) {
  Table& table = *txn.trouble_table;
  const bool evicts = table.evicts();
  if (tries >= kRoomTries) return false;
  // What a snapshot can see comes back to nobody, however many rows go.
  const auto expire = [&] {
    return store.retired_bytes() && !MUTANT(snapshot_before_rows) && store.expire_oldest(kIdle);
  };
  const size_t some = std::max<size_t>(64, table.rows.load() / 256);
  if (txn.trouble == Status::needs_index) {
    if (store.grow(worker, table, txn.trouble_hash, txn.trouble_buckets)) return true;
    Segment& segment = table.segment(txn.trouble_hash);
    for (int rounds = 0; rounds < 8 && evicts; ++rounds) {
      if (!expire() && evict(store, worker, table, some, worker.evict_before) == 0) break;
      store.settle(worker);
      if (segment.used.load() < segment.limit) return true;
      if (store.grow(worker, table, txn.trouble_hash, txn.trouble_buckets)) return true;
    }
    return false;
  }
  // What is found the second time may be what the first attempt gave back: then somebody has to go.
  const size_t enough = tries ? kGroup : 1;
  const auto scavenge = [&] {
    return store.scavenge(worker, txn.trouble_class, txn.trouble_insert, enough);
  };
  const bool found = scavenge();
  if (found && tries == 0) return true;
  for (int rounds = 0; rounds < 8; ++rounds) {  // a new snapshot may hold what has just gone
    if (!expire() &&
        (!evicts || evict(store, worker, table, some, worker.evict_before) == 0))
      return found && tries < 3;
    if (scavenge()) return true;
  }
  return false;
}

}  // namespace ray_pipe::rows
