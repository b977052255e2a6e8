// Reads and optimizer steps over arrays of keys.
#include <algorithm>

#include "group.hpp"

namespace ray_pipe::rows {

namespace {

void give(const Table& table, const Version* row, float* out, uint8_t& seen, size_t& spilled) {
  const size_t bytes = size_t{4} * table.config.dim;
  if (!row) {
    seen = static_cast<uint8_t>(Seen::absent);
    std::memset(out, 0, bytes);
  } else if (row->spilled()) {
    seen = static_cast<uint8_t>(Seen::spilled);
    std::memset(out, 0, bytes);
    ++spilled;
  } else {
    seen = static_cast<uint8_t>(Seen::present);
    table.read(row, out);
  }
}

// The general way: overflow buckets, equal tags, older versions.
Found search(Txn& txn, Table& table, int64_t key) {
  Get get(txn, table, key, false);
  while (!get.step()) {
  }
  return get.found;
}

constexpr size_t kAhead = 32;
constexpr size_t kBlock = 512;       // keys of one pass: what is noted of them stays near
constexpr int kRounds = 4;           // buckets beyond the home, before the general way is taken
constexpr size_t kMostLines = 256;   // of rows asked for ahead: half of a small first-level cache

// Calls use(i, slot, row) for each key, in order. Two passes over a block of keys, each with the
// lines of `group` keys asked for ahead: first the buckets, then the rows. What is usually so is a
// branch, not a choice of values: behind a predicted branch the core goes on to the next keys while
// this one's line is still on its way.
template <class Use>
void for_each_row(Txn& txn, Table& table, const int64_t* keys, const size_t n, const size_t group,
                  Use use) {
  struct Asked {
    uint64_t tag;
    Bucket* bucket;  // nullptr: the key is absent
  };
  Asked asked[kBlock];
  Word* slots[kBlock];
  const Version* rows[kBlock];
  uint16_t further[kBlock];  // keys that are not in their home bucket: one in sixteen when full
  const uint64_t snapshot = txn.snapshot();
  const size_t bytes = table.full_bytes();
  const size_t buckets_ahead = std::min(group, kBlock);
  const size_t rows_ahead = std::clamp<size_t>(kMostLines / (bytes / 64 + 1), 1, buckets_ahead);
  const auto look = [&](size_t i) {  // true: this bucket decides; without a row the general way does
    rows[i] = nullptr;
    const uint32_t found = matches(*asked[i].bucket, asked[i].tag);
    if (!found) return false;
    slots[i] = &asked[i].bucket->slots[__builtin_ctz(found)];
    POINT();
    const uint64_t word = slots[i]->load(std::memory_order_acquire);
    if (word >> 48 == asked[i].tag) rows[i] = version_of(word);
    else if (MUTANT(first_candidate_only)) return false;
    return true;  // no row: returned or reused since, and another slot may have the tag too
  };
  const auto go_on = [&](size_t from, size_t i) {  // to the next bucket, if there may be more
    Bucket*& bucket = asked[i].bucket;
    const bool more = bucket->header.load(std::memory_order_acquire) & kOverflow;
    if (more) {
      const Segment& segment = table.segment(table.hash(keys[from + i]));
      bucket = segment.buckets + segment.after(static_cast<uint32_t>(bucket - segment.buckets));
      prefetch(bucket);
    } else {
      bucket = nullptr;
    }
    return more;
  };
  const auto ask_row = [&](size_t i) {
    if (rows[i]) prefetch_lines(rows[i], bytes);
  };
  for (size_t from = 0; from < n; from += kBlock) {
    const size_t here = std::min(n - from, kBlock);
    for (size_t i = 0; i < here; ++i) {
      const uint64_t hash = table.hash(keys[from + i]);
      const Segment& segment = table.segment(hash);
      asked[i] = {tag_of(hash), segment.buckets + segment.home(hash)};
    }
    for (size_t i = 0; i < std::min(here, buckets_ahead); ++i) prefetch(asked[i].bucket);
    size_t num_further = 0;
    for (size_t i = 0; i < here; ++i) {
      if (i + buckets_ahead < here) prefetch(asked[i + buckets_ahead].bucket);
      if (!look(i) && go_on(from, i)) further[num_further++] = static_cast<uint16_t>(i);
    }
    for (int round = 0; num_further && round < kRounds; ++round) {
      size_t left = 0;
      for (size_t f = 0; f < num_further; ++f)
        if (const uint16_t i = further[f]; !look(i) && go_on(from, i)) further[left++] = i;
      num_further = left;
    }
    for (size_t i = 0; i < std::min(here, rows_ahead); ++i) ask_row(i);
    for (size_t i = 0; i < here; ++i) {
      if (i + rows_ahead < here) ask_row(i + rows_ahead);
      const Version* row = rows[i];
      if (row && row->key == keys[from + i] && row->stamp() <= snapshot && !row->absent())
          [[likely]] {
        use(from + i, slots[i], row);
      } else if (!asked[i].bucket) {
        use(from + i, nullptr, nullptr);
      } else {  // far from home, another key of this tag, an older version, a tombstone
        const Found found = search(txn, table, keys[from + i]);
        use(from + i, found.slot, found.row);
      }
    }
  }
}

}  // namespace

size_t multi_get(Store& store, Table& table, const int64_t* keys, size_t n, float* out,
                 uint8_t* seen, const SnapshotEntry* snapshot, size_t group) {
  const Borrowed worker(store);
  const Batch scope(store, *worker, snapshot);
  Txn txn(store, *worker);
  txn.begin(scope.snapshot());
  size_t spilled = 0;
  const size_t dim = table.config.dim;
  if (group > 1) {
    for_each_row(txn, table, keys, n, group, [&](size_t i, Word*, const Version* row) {
      give(table, row, out + i * dim, seen[i], spilled);
    });
    return spilled;
  }
  for (size_t i = 0; i < n; ++i) {  // what a plain hash table does: find, then copy
    const Word* slot = table.find(table.hash(keys[i]), keys[i]);
    const Version* row = slot ? version_of(slot->load(std::memory_order_acquire)) : nullptr;
    if (row && (row->key != keys[i] || row->stamp() > txn.snapshot()))
      row = search(txn, table, keys[i]).row;
    if (row && row->absent()) row = nullptr;
    give(table, row, out + i * dim, seen[i], spilled);
  }
  return spilled;
}

// --- training -------------------------------------------------------------------------------------

namespace {

struct Twice {
  size_t at, first;
};

// Leaves each key once, where it came first; returns where the others are.
std::vector<Twice> set_repeats_aside(std::vector<int64_t>& keys, std::vector<size_t>& where) {
  std::vector<size_t> order(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return keys[a] != keys[b] ? keys[a] < keys[b] : a < b;
  });
  std::vector<Twice> twice;
  std::vector<bool> again(keys.size(), false);
  for (size_t i = 1, first = 0; i < order.size(); ++i) {
    if (keys[order[i]] == keys[order[first]]) {
      twice.push_back({where[order[i]], where[order[first]]});
      again[order[i]] = true;
    } else {
      first = i;
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (again[i]) continue;
    keys[kept] = keys[i];
    where[kept++] = where[i];
  }
  keys.resize(kept);
  where.resize(kept);
  return twice;
}

}  // namespace

LookupResult lookup(Store& store, Table& table, const int64_t* keys, size_t n, float* out,
                    uint8_t* seen, uint64_t step) {
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  LookupResult result;
  const uint64_t evicted_before = worker.counters.evicted.load(std::memory_order_relaxed);
  const size_t dim = table.config.dim;
  std::vector<int64_t> missing;
  std::vector<size_t> where;
  uint64_t first_touch = 0;
  {
    const Batch scope(store, worker);
    Txn txn(store, worker);
    txn.begin(scope.snapshot());
    size_t spilled = 0;
    std::unique_lock<std::mutex> lock(table.recency.mutex, std::defer_lock);
    if (table.config.lru) {
      lock.lock();
      shorten_queue(table);
      table.recency.mark(std::max(step, table.recency.newest_step()));
      first_touch = table.recency.end();
    }
    for_each_row(txn, table, keys, n, kAhead, [&](size_t i, Word* slot, const Version* row) {
      give(table, row, out + i * dim, seen[i], spilled);
      if (!row) {
        missing.push_back(keys[i]);
        where.push_back(i);
      } else if (table.config.lru && !row->spilled()) {
        touch(table, table.hash(keys[i]), keys[i], slot);
      }
    });
    result.spilled = spilled;
  }
  worker.evict_before = table.config.lru ? first_touch : kIdle;
  const std::vector<Twice> twice = set_repeats_aside(missing, where);
  const auto too_many = [&](size_t more) {
    const Batch scope(store, worker);
    return store.over(more * table.full_bytes());
  };
  for (size_t from = 0; from < missing.size();) {
    const size_t here = std::min(kGroup, missing.size() - from);
    const int64_t* group = missing.data() + from;
    const uint64_t resident = table.rows.load() - table.spilled_rows.load();
    if (table.evicts()) {
      uint64_t go = 0;
      if (table.config.max_rows && resident + here > table.config.max_rows)
        go = resident + here - table.config.max_rows;
      const uint64_t bytes = too_many(here);
      // A few at a time: another table may have taken the room, and this one is not to be emptied.
      go = std::max(go, std::min<uint64_t>(bytes / table.full_bytes() + (bytes > 0), 2 * here));
      if (go) evict(store, worker, table, go, first_touch);
    }
    uint64_t inserted = 0;
    const auto insert = [&](Txn& txn, Get& get, size_t i) {
      if (i == 0) inserted = 0;
      const size_t at = where[from + i];
      if (get.found.row) {
        if (get.found.row->spilled()) return;
        table.read(get.found.row, out + at * dim);
        return;
      }
      table.init(get.key(), out + at * dim);
      if (Version* fresh = txn.write(get, table.all_chunks())) {
        table.fill(fresh, get.key(), out + at * dim, table.all_chunks());
        ++inserted;
      }
    };
    const auto accept = [&](size_t first, size_t count) {
      result.inserted += inserted;
      for (size_t i = first; i < first + count; ++i)
        seen[where[i]] = static_cast<uint8_t>(Seen::present);
      if (!table.config.lru) return;
      const Batch scope(store, worker);
      const std::lock_guard lock(table.recency.mutex);
      for (size_t i = first; i < first + count; ++i) {
        const uint64_t hash = table.hash(missing[i]);
        Word* slot = table.find(hash, missing[i]);
        if (slot && version_of(slot->load())->recency.load() == kNoRecency)
          touch(table, hash, missing[i], slot);
      }
    };
    const auto room = [&](uint64_t wanted) {
      const uint64_t rows = table.rows.load() - table.spilled_rows.load();
      return !table.config.max_rows || rows + wanted <= table.config.max_rows;
    };
    if (room(here) && grouped(store, worker, table, group, here, insert) == Status::ok) {
      accept(from, here);
      from += here;
      continue;
    }
    for (size_t end = from + here; from < end; ++from) {  // up to the last that fits
      const bool fits = room(1);
      const auto one = [&](Txn& txn, Get& get, size_t) { insert(txn, get, 0); };
      if (fits && grouped(store, worker, table, missing.data() + from, 1, one) == Status::ok) {
        accept(from, 1);
      } else {
        table.init(missing[from], out + where[from] * dim);
        ++result.full;
      }
    }
  }
  worker.evict_before = kIdle;
  // Those that went at `max_rows`, and those that an insert without memory sent away.
  result.evicted = worker.counters.evicted.load(std::memory_order_relaxed) - evicted_before;
  for (const Twice& t : twice) {
    std::memcpy(out + t.at * dim, out + t.first * dim, 4 * dim);
    seen[t.at] = seen[t.first];
    result.full += seen[t.at] == static_cast<uint8_t>(Seen::absent);
  }
  return result;
}

ApplyResult apply(Store& store, Table& table, const int64_t* keys, size_t n, const float* gradients,
                  double lr, const float* counts, uint8_t* seen) {
  const Borrowed worker(store);
  const StepNumbers step = table.numbers(lr, table.steps.fetch_add(1) + 1);
  const size_t dim = table.config.dim;
  ApplyResult result;
  for (size_t from = 0; from < n; from += kGroup) {
    const size_t here = std::min(kGroup, n - from);
    const Status status = grouped(
        store, *worker, table, keys + from, here, [&](Txn& txn, Get& get, size_t i) {
          const Version* old = get.found.row;
          const Seen what = !old ? Seen::absent : old->spilled() ? Seen::spilled : Seen::present;
          seen[from + i] = static_cast<uint8_t>(what);
          if (what != Seen::present) return;  // its gradient is skipped, its neighbours' are not
          if (Version* fresh = txn.write(get, old->alive()))
            table.optimize(fresh, old, gradients + (from + i) * dim,
                           counts ? counts[from + i] : 1.0f, step);
        });
    if (status != Status::ok) {
      result.full += here;
      std::fill_n(seen + from, here, static_cast<uint8_t>(Seen::absent));
      continue;
    }
    for (size_t i = from; i < from + here; ++i) {
      result.applied += seen[i] == static_cast<uint8_t>(Seen::present);
      result.absent += seen[i] == static_cast<uint8_t>(Seen::absent);
      result.spilled += seen[i] == static_cast<uint8_t>(Seen::spilled);
    }
  }
  return result;
}

}  // namespace ray_pipe::rows
