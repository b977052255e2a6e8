// Tests of the stress program that are no histories: what rows begin as, and where cells are.
// Included by stress.cpp, behind what it uses of it.
#pragma once

#include <unordered_set>

namespace ray_pipe::rows {

// Looks into a store that nobody works on.
struct Auditor {
  // Of every slab in use: rows that are there and cells that are free are all its cells, each once.
  static const char* fault(Store& store) {
    const Borrowed worker(store);
    {
      const Closed closed(store);
      store.gather(*worker);
    }
    const Arena& arena = store.arena;
    std::vector<size_t> known(arena.num_slabs(), 0), alive(arena.num_slabs(), 0);
    std::unordered_set<const void*> seen;
    const char* wrong = nullptr;
    const auto note = [&](const void* cell, std::vector<size_t>& into) {
      if (!seen.insert(cell).second) wrong = "a cell is in two places";
      ++into[arena.slab_of(cell)];
    };
    store.each_worker([&](const Worker& w) {
      if (w.retired_from != w.retired.size()) wrong = "cells wait though nobody reads";
      for (int c = 0; c < arena.num_classes(); ++c) {
        for (const Version* v : w.cells[c].free) note(v, known);
        for (const char* p = w.cells[c].bump; p != w.cells[c].end; p += arena.cell_bytes(c))
          note(p, known);
      }
    });
    for (const auto& shared : store.shared_)
      for (const Version* v : shared.free) note(v, known);
    for (const auto& table : store.tables())
      for (const Segment& s : table->segments)
        for (uint32_t b = 0; b < s.num_buckets; ++b)
          for (const Word& slot : s.buckets[b].slots)
            if (const uint64_t word = slot.load()) note(version_of(word), alive);
    for (size_t slab = 0; slab < arena.num_slabs() && !wrong; ++slab) {
      const int c = arena.class_at(slab);
      if (c == kNoClass) {
        if (known[slab] + alive[slab]) wrong = "a cell of a slab that was given back";
      } else if (arena.vacating(slab)) {  // its free cells are not used again
        if (known[slab]) wrong = "a cell of a slab that is being emptied is free";
      } else if (known[slab] + alive[slab] != arena.cells_per_slab(c)) {
        wrong = "alive and free cells are not all of a slab";
      }
    }
    return wrong;
  }
};

namespace {

TableConfig trained(const char* name) {
  TableConfig c;
  c.name = name;
  c.dim = 8;
  c.chunks = 4;
  c.optimizer = Optimizer::row_adagrad;
  c.init = Init::uniform;
  c.init_scale = 0.1;
  c.lru = true;
  c.max_rows = 600;
  return c;
}

// Rows are made, dropped and made again by every thread: they begin as (seed, table, key) says.
void same_beginning() {
  const Deadline deadline;
  Store store(small());
  Table& table = store.add_table(trained("rows"));
  constexpr size_t kDim = 8, kKeys = 900;
  std::vector<float> right(kKeys * kDim);
  for (size_t k = 0; k < kKeys; ++k) table.init(static_cast<int64_t>(k), right.data() + k * kDim);
  on_threads(3, [&](int) {
    std::vector<int64_t> keys(64);
    std::vector<float> out(64 * kDim);
    std::vector<uint8_t> seen(64);
    while (!deadline.passed()) {
      for (auto& k : keys) k = static_cast<int64_t>(dice() % kKeys);
      lookup(store, table, keys.data(), 64, out.data(), seen.data());
      for (size_t i = 0; i < 64; ++i)
        expect(!std::memcmp(&out[i * kDim], &right[static_cast<size_t>(keys[i]) * kDim],
                            sizeof(float) * kDim),
               "a row begins as who made it says, not as its key does");
    }
  });
}

// Insert, step, prune, delete, evict, compact, at random, a million rows by one thread and then by
// three: alive + free = total, and no cell is in two places.
void cells() {
  const Deadline deadline;
  Store store(small(size_t{2} << 20));
  Table* tables[] = {&store.add_table(trained("one")), &store.add_table(trained("two"))};
  const auto work = [&](size_t wanted, const Deadline& until) {
    std::vector<int64_t> keys(64);
    std::vector<float> out(64 * 8), g(64 * 8, 0.5f);
    std::vector<uint8_t> seen(64);
    for (size_t done = 0; done < wanted && !until.passed(); done += 64) {
      Table& table = *tables[dice() % 2];
      for (auto& k : keys) k = static_cast<int64_t>(dice() % 1500);
      const unsigned what = dice() % 64;
      if (what < 32) lookup(store, table, keys.data(), 64, out.data(), seen.data());
      else if (what < 58)
        apply(store, table, keys.data(), 64, g.data(), 0.01, nullptr, seen.data());
      else if (what < 61) remove(store, table, keys.data(), 16);
      else if (what < 62) prune(store, table, dice() % 2400, kEven);
      else if (what < 63) compact(store);
      else {
        const Borrowed worker(store);
        evict(store, *worker, table, dice() % 100, kIdle);
      }
    }
  };
  const auto audit = [&] {
    if (const char* wrong = Auditor::fault(store)) expect(false, wrong);
  };
  yield_every.store(0);
  Deadline long_enough;
  long_enough.end += std::chrono::minutes(2);
  for (int round = 0; round < 20 && !failed.load(); ++round) {
    work(50'000, long_enough);
    audit();
  }
  yield_every.store(12);
  while (!deadline.passed()) {
    on_threads(3, [&](int) { work(20'000, deadline); });
    audit();
  }
}

}  // namespace
}  // namespace ray_pipe::rows
