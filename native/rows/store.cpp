#include "store.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

namespace ray_pipe::rows {

void* FramePool::take(size_t bytes) {
  const size_t size = (bytes + kStep - 1) / kStep;
  if (size < kSizes && !free_[size].empty()) {
    void* frame = free_[size].back();
    free_[size].pop_back();
    return frame;
  }
  return ::operator new(size * kStep);
}

void FramePool::give(void* frame, size_t bytes) {
  const size_t size = (bytes + kStep - 1) / kStep;
  if (size < kSizes && free_[size].size() < 64) free_[size].push_back(frame);
  else ::operator delete(frame);
}

FramePool::~FramePool() {
  for (auto& frames : free_)
    for (void* frame : frames) ::operator delete(frame);
}

Store::Store(StoreConfig config_)
    : config(config_), arena(config.capacity, config.slab_bytes, config.huge) {}

Table& Store::add_table(TableConfig table) {
  const Closed closed(*this);
  const std::lock_guard lock(mutex_);
  for (const auto& other : tables_)
    if (other->config.name == table.name)
      throw std::invalid_argument("there is a table '" + table.name + "' already");
  tables_.push_back(
      std::make_unique<Table>(static_cast<uint32_t>(tables_.size()), std::move(table), arena));
  return *tables_.back();
}

// --- workers and snapshots ------------------------------------------------------------------------

Worker& Store::borrow() {
  const std::lock_guard lock(mutex_);
  if (!idle_.empty()) {
    Worker* worker = idle_.back();
    idle_.pop_back();
    return *worker;
  }
  const int n = num_workers_.load(std::memory_order_relaxed);
  if (n == kMaxWorkers)
    throw StoreError("more than " + std::to_string(kMaxWorkers) +
                     " threads use one store at the same time; use fewer");
  idle_.reserve(static_cast<size_t>(n) + 1);  // so that handing back never allocates
  workers_[n] = std::make_unique<Worker>();
  num_workers_.store(n + 1, std::memory_order_release);
  return *workers_[n];
}

void Store::hand_back(Worker& worker) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(&worker);
}

namespace {
// Store 0, load `visible`, store it: whoever computes a horizon in between sees 0 and frees nothing.
uint64_t enter(std::atomic<uint64_t>& entry, const std::atomic<uint64_t>& visible) {
  if (!MUTANT(late_registration)) entry.store(0);
  const uint64_t snapshot = visible.load();
  POINT();
  entry.store(snapshot);
  return snapshot;
}
}  // namespace

SnapshotEntry& Store::open_snapshot() {
  const std::lock_guard lock(mutex_);
  for (int i = 0; i < kMaxSnapshots; ++i)
    if (SnapshotEntry& s = snapshots_[i]; !s.taken) {
      s.taken = true;
      if (i >= num_snapshots_.load()) num_snapshots_.store(i + 1);  // before it counts
      s.expired.store(false);
      enter(s.stamp, visible);
      return s;
    }
  throw StoreError("more than " + std::to_string(kMaxSnapshots) +
                   " snapshots are open; close some");
}

void Store::close_snapshot(SnapshotEntry& snapshot) {
  const std::lock_guard lock(mutex_);
  snapshot.stamp.store(kIdle);
  snapshot.taken = false;
}

uint64_t Store::horizon() const {
  uint64_t least = visible.load();
  each_worker([&](const Worker& w) { least = std::min(least, w.entry.load()); });
  for (int i = 0, n = num_snapshots_.load(); i < n; ++i) {
    const SnapshotEntry& s = snapshots_[i];
    if (const uint64_t stamp = s.stamp.load(); stamp < least && !s.expired.load()) least = stamp;
  }
  return least;
}

bool Store::expire_oldest(uint64_t limit) {
  const std::lock_guard lock(mutex_);
  SnapshotEntry* oldest = nullptr;
  for (SnapshotEntry& s : snapshots_)
    if (s.taken && !s.expired.load() && (!oldest || s.stamp.load() < oldest->stamp.load()))
      oldest = &s;
  if (!oldest || oldest->stamp.load() > limit) return false;  // not what holds the horizon back
  oldest->expired.store(true);
  snapshots_expired.fetch_add(1);
  return true;
}

uint64_t Store::over(uint64_t more) const {
  uint64_t fixed = arena.charged_bytes(), evictable = more;
  for (const auto& table : tables_) (table->evicts() ? evictable : fixed) += table->newest_bytes();
  const uint64_t room = config.capacity > fixed ? config.capacity - fixed : 0;
  const uint64_t most = room - room / kHeadroom;
  return evictable > most ? evictable - most : 0;
}

uint64_t Store::retired_bytes() const {
  uint64_t sum = 0;
  each_worker([&](const Worker& w) { sum += w.retired_bytes.load(); });
  return sum;
}

Batch::Batch(Store& store, Worker& worker, const SnapshotEntry* pinned) : worker_(worker) {
  for (;;) {
    worker.active.store(1);
    if (!store.gate.load()) break;
    worker.active.store(0);
    while (store.gate.load()) std::this_thread::yield();
  }
  if (!pinned) {
    snapshot_ = enter(worker.entry, store.visible);
    return;
  }
  snapshot_ = pinned->stamp.load();
  worker.entry.store(snapshot_);
  if (pinned->expired.load()) {  // after the entry: from here on it cannot expire under us
    worker.entry.store(kIdle);
    worker.active.store(0);
    throw SnapshotExpired(
        "the snapshot of stamp " + std::to_string(snapshot_) +
        " has expired: the rows written since then outgrew `snapshot_budget`, or the capacity had no "
        "room for them beside those that the snapshot held; read faster, take a new snapshot, or "
        "raise `snapshot_budget` or `capacity`");
  }
}

Batch::~Batch() {
  worker_.entry.store(kIdle);
  worker_.active.store(0);
}

namespace {
uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}
}  // namespace

Closed::Closed(Store& store) : store_(store), lock_(store.maintenance_) {
  since_ = now_ns();
  store.gate.store(true);
  store.each_worker([](Worker& w) {
    while (w.active.load()) std::this_thread::yield();
  });
}

Closed::~Closed() {
  store_.gate.store(false);
  const uint64_t pause = now_ns() - since_;
  if (pause > store_.longest_pause_ns.load()) store_.longest_pause_ns.store(pause);
}

// --- memory of versions ---------------------------------------------------------------------------

namespace {
// Free cells of one class that a worker keeps before it shares.
size_t spare_cells(const Arena& arena, int size_class) {
  return std::clamp<size_t>(arena.cells_per_slab(size_class), 64, 4096);
}
}  // namespace

Version* Store::allocate(Worker& worker, int size_class, bool insert) {
  if (ALLOCATION_FAILS()) throw std::bad_alloc();
  Worker::Cells& cells = worker.cells[size_class];
  if (!cells.free.empty() || (cells.bump == cells.end && take_shared(worker, size_class))) {
    Version* v = cells.free.back();
    cells.free.pop_back();
    const size_t left = cells.free.size();
    if (left >= 4) {  // recycled cells are cold
      prefetch_write(cells.free[left - 4]);
      prefetch_write(reinterpret_cast<char*>(cells.free[left - 4]) + 64);
    }
    return v;
  }
  if (cells.bump == cells.end) {
    char* slab = arena.take_slab(size_class, !insert);
    if (!slab) return nullptr;
    cells.bump = slab;
    cells.end = slab + arena.cells_per_slab(size_class) * arena.cell_bytes(size_class);
  }
  auto* v = reinterpret_cast<Version*>(cells.bump);
  cells.bump += arena.cell_bytes(size_class);
  return v;
}

void Store::release(Worker& worker, Version* version) {
  const size_t slab = arena.slab_of(version);
  if (arena.vacating(slab)) {
    arena.cell_left(slab);
    return;
  }
  const int size_class = arena.class_at(slab);
  if (MUTANT(cell_forgotten) && DRAW() % 1000 == 0) return;
  if (MUTANT(cell_freed_twice) && DRAW() % 1000 == 0)
    worker.cells[size_class].free.push_back(version);
  worker.cells[size_class].free.push_back(version);
  if (worker.cells[size_class].free.size() > spare_cells(arena, size_class))
    share(worker, size_class);
}

bool Store::take_shared(Worker& worker, int size_class) {
  Shared& shared = shared_[size_class];
  if (shared.size.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(shared_mutex_);
  auto& cells = worker.cells[size_class].free;
  const size_t some = std::min(shared.free.size(), spare_cells(arena, size_class) / 2);
  cells.insert(cells.end(), shared.free.end() - static_cast<std::ptrdiff_t>(some),
               shared.free.end());
  shared.free.resize(shared.free.size() - some);
  shared.size.store(shared.free.size(), std::memory_order_relaxed);
  return some > 0;
}

void Store::share(Worker& worker, int size_class) {
  Shared& shared = shared_[size_class];
  const std::lock_guard lock(shared_mutex_);
  auto& cells = worker.cells[size_class].free;
  const auto half = cells.begin() + static_cast<std::ptrdiff_t>(cells.size() / 2);
  shared.free.insert(shared.free.end(), cells.begin(), half);  // the colder half
  cells.erase(cells.begin(), half);
  shared.size.store(shared.free.size(), std::memory_order_relaxed);
}

void Store::retire(Worker& worker, Version* version, uint64_t stamp) {
  worker.retired.push_back({version, stamp});  // reserved by the commit: does not allocate
  bump(worker.retired_bytes, arena.cell_bytes(arena.class_at(arena.slab_of(version))));
}

void Store::reclaim(Worker& worker) {
  const uint64_t limit = horizon();
  size_t i = worker.retired_from;
  uint64_t freed = 0;
  for (; i < worker.retired.size() && worker.retired[i].stamp <= limit; ++i) {
    if (i + 8 < worker.retired.size()) prefetch(worker.retired[i + 8].version);
    freed += arena.cell_bytes(arena.class_at(arena.slab_of(worker.retired[i].version)));
    release(worker, worker.retired[i].version);
  }
  worker.retired_from = i;
  if (i == worker.retired.size() || i > worker.retired.size() / 2 + 1024) {
    worker.retired.erase(worker.retired.begin(),
                         worker.retired.begin() + static_cast<std::ptrdiff_t>(i));
    worker.retired_from = 0;
  }
  const uint64_t left = worker.retired_bytes.load(std::memory_order_relaxed) - freed;
  worker.retired_bytes.store(left, std::memory_order_relaxed);
  const size_t budget = config.snapshot_budget ? config.snapshot_budget : config.capacity / 4;
  if (left && retired_bytes() > budget) expire_oldest(limit);
}

void Store::publish(uint64_t stamp) {
  if (!MUTANT(unordered_publication))
    for (int spins = 0; visible.load(std::memory_order_acquire) != stamp - 1; ++spins) {
      if (spins < 64) relax();
      else std::this_thread::yield();
    }
  visible.store(stamp);
}

}  // namespace ray_pipe::rows
