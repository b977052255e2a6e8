// Pruning by utility, to a number of chunks; and giving the memory back.
//
// All chunks of all rows are ranked by utility times the weight of their column, and of how long the
// row was not used (a histogram of half floats: exact and one pass). Weights that fall from column to
// column make rows agree on the columns they keep.
// Those above the cut live, the others go; at the cut, chunks that live stay first, and the order of
// hashes decides. A chunk that comes back is zero, with fresh state. Rows change by commits, so a
// reader sees the old row or the new, never a mix.
#include <algorithm>

#include "group.hpp"

namespace ray_pipe::rows {

bool collect(Table& table, uint64_t snapshot, uint64_t& cursor, size_t at_least,
             std::vector<RowAt>& rows) {
  rows.clear();
  for (uint64_t s = cursor >> 58; s < kSegments; ++s) {
    Segment& segment = table.segments[s];
    // In order of homes, hence of hashes: a cursor stays good when the segment has grown.
    uint32_t home = s == cursor >> 58 ? segment.home(cursor) : 0;
    for (; home < segment.num_buckets; ++home) {
      const size_t before = rows.size();
      uint32_t b = home;
      for (uint32_t probes = 0; probes < segment.num_buckets; ++probes, b = segment.after(b)) {
        if (probes == 0 && home + 4 < segment.num_buckets) {  // two misses ahead
          prefetch(segment.buckets + home + 4);
          for (const Word& slot : segment.buckets[home + 1].slots)
            if (const uint64_t soon = slot.load(std::memory_order_acquire))
              prefetch(version_of(soon));
        }
        const Bucket& bucket = segment.buckets[b];
        for (const Word& slot : bucket.slots) {
          const uint64_t word = slot.load(std::memory_order_acquire);
          if (!word) continue;
          const Version* v = version_of(word);
          const uint64_t hash = table.hash(v->key);
          if (segment.home(hash) != home || hash < cursor) continue;
          while (v && v->stamp() > snapshot) v = v->next;
          if (v && !v->absent()) rows.push_back({hash, v});
        }
        if (!(bucket.header.load(std::memory_order_acquire) & kOverflow)) break;
      }
      std::sort(rows.begin() + static_cast<std::ptrdiff_t>(before), rows.end(),
                [](const RowAt& a, const RowAt& b) { return a.hash < b.hash; });
      if (rows.size() >= at_least) {
        cursor = rows.back().hash + 1;
        return cursor != 0;  // false: that was the last hash there is
      }
    }
  }
  return false;
}

namespace {

// Calls visit(rows) with some thousand rows at a time, in order of hashes, in an open batch.
template <class Visit, class After>
void each_row(Store& store, Worker& worker, Table& table, Visit visit, After after) {
  std::vector<RowAt> rows;
  uint64_t cursor = 0;
  for (bool more = true; more;) {
    {
      const Batch scope(store, worker);
      more = collect(table, scope.snapshot(), cursor, 4096, rows);
      for (const RowAt& r : rows) visit(r.row);
    }
    after();
  }
}

}  // namespace

PruneResult prune(Store& store, Table& table, uint64_t max_alive_chunks, const float* weights,
                  uint32_t ages) {
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  const uint32_t k = table.config.chunks;
  table.epoch.fetch_add(1);
  std::vector<uint64_t> living(0x7c00, 0), gone(0x7c00, 0);
  uint16_t u[8];
  bool useless = true;  // the row in hand: no chunk has any utility
  const auto score = [&](const Version* row) {
    table.utilities(row, u);
    useless = true;
    const float* weight = weights + size_t{k} * std::min(table.idle_periods(row), ages - 1);
    for (uint32_t c = 0; c < k; ++c) {
      useless = useless && u[c] == 0;
      u[c] = half_of(float_of(u[c]) * weight[c]);
    }
  };
  each_row(store, worker, table, [&](const Version* row) {
    if (row->spilled()) return;
    score(row);
    for (uint32_t c = 0; c < k; ++c) ++(row->alive() >> c & 1 ? living : gone)[u[c]];
  }, [] {});

  int cut = 0x7bff;
  uint64_t above = 0;
  for (; cut >= 0 && above + living[cut] + gone[cut] <= max_alive_chunks; --cut)
    above += living[cut] + gone[cut];
  uint64_t keep = 0, regrow = 0;  // of those at the cut
  if (cut >= 0) {
    keep = std::min(max_alive_chunks - above, living[cut]);
    regrow = max_alive_chunks - above - keep;
  }

  PruneResult result;
  std::vector<int64_t> keys;
  std::vector<uint8_t> wanted;
  std::vector<bool> drop;
  each_row(
      store, worker, table,
      [&](const Version* row) {
        ++result.rows;
        if (row->spilled()) return;
        score(row);
        uint8_t alive = 0;
        for (uint32_t c = 0; c < k; ++c) {
          const bool has = row->alive() >> c & 1;
          bool lives = u[c] > cut;
          if (u[c] == cut && (has ? keep : regrow) > 0) {
            --(has ? keep : regrow);
            lives = true;
          }
          alive |= static_cast<uint8_t>(lives << c);
        }
        if (alive == row->alive() && !(alive == 0 && useless)) return;
        keys.push_back(row->key);
        wanted.push_back(alive);
        drop.push_back(alive == 0 && useless);
      },
      [&] {
        for (size_t from = 0; from < keys.size(); from += kGroup) {
          PruneResult now;
          const Status status = grouped(
              store, worker, table, keys.data() + from, std::min(kGroup, keys.size() - from),
              [&](Txn& txn, Get& get, size_t i) {
                if (i == 0) now = {};
                const Version* row = get.found.row;
                if (!row || row->spilled()) return;
                if (drop[from + i]) {
                  now.dropped += txn.write_header(get, kTombstone) != nullptr;
                  now.pruned += static_cast<uint64_t>(__builtin_popcount(row->alive()));
                  return;
                }
                const uint8_t alive = wanted[from + i];
                if (alive == row->alive()) return;
                if (Version* fresh = txn.write(get, alive)) table.reshape(fresh, row, alive);
                now.pruned += static_cast<uint64_t>(__builtin_popcount(row->alive() & ~alive));
                now.regrown += static_cast<uint64_t>(__builtin_popcount(alive & ~row->alive()));
              });
          if (status != Status::ok) continue;  // no memory: these rows stay as they are
          result.pruned += now.pruned;
          result.regrown += now.regrown;
          result.dropped += now.dropped;
        }
        keys.clear();
        wanted.clear();
        drop.clear();
      });
  tidy(store, worker, true);
  result.alive = table.alive_chunks.load();
  return result;
}

namespace {

size_t leave_sparse_slabs(Store& store) {
  const Borrowed borrowed(store);
  Worker& worker = *borrowed;
  const size_t marked = store.mark_sparse_slabs(worker);
  if (!marked) return 0;
  for (const auto& table : store.tables()) {
    std::vector<int64_t> keys;
    each_row(
        store, worker, *table,
        [&](const Version* row) {
          if (store.arena.vacating(store.arena.slab_of(row))) keys.push_back(row->key);
        },
        [&] {
          for (size_t from = 0; from < keys.size(); from += kGroup)
            grouped(store, worker, *table, keys.data() + from,
                    std::min(kGroup, keys.size() - from), [&](Txn& txn, Get& get, size_t) {
                      const Version* row = get.found.row;
                      if (!row || !store.arena.vacating(store.arena.slab_of(row))) return;
                      if (row->spilled()) {
                        if (Version* fresh = txn.write_header(get, kSpilled))
                          fresh->set_disk_stamp(row->disk_stamp());
                      } else if (Version* fresh = txn.write(get, row->alive())) {
                        table->copy(fresh, row);
                      }
                    });
          keys.clear();
        });
  }
  tidy(store, worker, true);
  return marked;
}

}  // namespace

size_t compact(Store& store) {
  const size_t marked = leave_sparse_slabs(store);
  trim_heap();
  return marked;
}

}  // namespace ray_pipe::rows
