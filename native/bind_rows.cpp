// Python faces of the row store. stages/embedding/row_store.py has checked shapes and dtypes; arrays
// are used where they lie, and the GIL is released while the store works.
#include <unistd.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "rows/group.hpp"
#include "rows/procedures.hpp"

namespace nb = nanobind;

namespace ray_pipe {
namespace {

using namespace rows;  // NOLINT: the names of this file are the store's

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using Keys = Array<const int64_t>;
using Stats = std::map<std::string, uint64_t>;

template <class T>
T* data(const std::optional<Array<T>>& array) {
  return array ? array->data() : nullptr;
}

size_t cache_bytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? static_cast<size_t>(bytes) : size_t{512} << 10;
}

// A snapshot that Python holds: what it can see is not freed until it is closed.
class HeldSnapshot {
 public:
  explicit HeldSnapshot(std::shared_ptr<Store> store)
      : store_(std::move(store)), entry_(&store_->open_snapshot()), stamp_(entry_->stamp.load()) {}
  ~HeldSnapshot() { close(); }
  HeldSnapshot(const HeldSnapshot&) = delete;
  HeldSnapshot& operator=(const HeldSnapshot&) = delete;
  void close() {
    if (entry_) store_->close_snapshot(*entry_);
    entry_ = nullptr;
  }
  const SnapshotEntry& entry() const {
    if (!entry_) throw StoreError("the snapshot is closed; take a new one");
    return *entry_;
  }
  uint64_t stamp() const { return stamp_; }

 private:
  std::shared_ptr<Store> store_;
  SnapshotEntry* entry_;
  uint64_t stamp_;
};

const SnapshotEntry* entry(const HeldSnapshot* snapshot) {
  return snapshot ? &snapshot->entry() : nullptr;
}

struct PyTable {
  std::shared_ptr<Store> store;
  Table* table;

  size_t multi_get(Keys keys, Array<float> out, Array<uint8_t> seen, const HeldSnapshot* snapshot,
                   size_t group) const {
    const SnapshotEntry* at = entry(snapshot);
    const nb::gil_scoped_release free;
    return rows::multi_get(*store, *table, keys.data(), keys.size(), out.data(), seen.data(), at,
                           group);
  }
  std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> lookup(Keys keys, Array<float> out,
                                                            Array<uint8_t> seen,
                                                            uint64_t step) const {
    const nb::gil_scoped_release free;
    const auto r =
        rows::lookup(*store, *table, keys.data(), keys.size(), out.data(), seen.data(), step);
    return {r.inserted, r.evicted, r.full, r.spilled};
  }
  std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> apply(
      Keys keys, Array<const float> gradients, double lr, std::optional<Array<const float>> counts,
      Array<uint8_t> seen) const {
    const nb::gil_scoped_release free;
    const auto r = rows::apply(*store, *table, keys.data(), keys.size(), gradients.data(), lr,
                               data(counts), seen.data());
    return {r.applied, r.absent, r.spilled, r.full};
  }
  void run(const std::string& name, Array<const int64_t> offsets, Keys keys,
           std::optional<Array<const float>> payload, std::optional<Array<const uint8_t>> modes,
           std::optional<Array<const uint64_t>> expected, std::optional<Array<float>> out,
           std::optional<Array<uint8_t>> seen, Array<uint8_t> statuses, int batch, int inlined,
           double lr, int64_t hops) const {
    const Procedure body = procedure(name);
    if (!body) throw std::invalid_argument("no procedure is called '" + name + "'");
    Arguments a;
    a.table = table;
    a.offsets = offsets.data();
    a.keys = keys.data();
    a.payload = data(payload);
    a.modes = data(modes);
    a.expected = data(expected);
    a.out = data(out);
    a.seen = data(seen);
    a.hops = hops;
    if (name == "optimize") a.step = table->numbers(lr, table->steps.fetch_add(1) + 1);
    const size_t resident = table->rows.load() * table->full_bytes() + table->index_bytes();
    const bool at_once = inlined < 0 ? resident <= cache_bytes() : inlined;
    uint8_t* to = statuses.data();
    const size_t count = statuses.size();
    const nb::gil_scoped_release free;
    run_lanes(*store, count, at_once ? 1 : batch, at_once, to,
              [&a, body](Txn& txn, size_t t) { return body(txn, &a, t); });
  }
  std::tuple<uint64_t, uint64_t, bool> scan(const HeldSnapshot* snapshot, uint64_t cursor,
                                            Array<int64_t> keys, Array<uint64_t> stamps,
                                            Array<uint32_t> recency, Array<uint8_t> records) const {
    const SnapshotEntry* at = entry(snapshot);
    const nb::gil_scoped_release free;
    const auto r = rows::scan(*store, *table, at, cursor, keys.size(), keys.data(), stamps.data(),
                              recency.data(), reinterpret_cast<char*>(records.data()));
    return {r.count, r.cursor, r.done};
  }
  size_t restore(Keys keys, Array<const uint8_t> records,
                 std::optional<Array<const uint64_t>> touched) const {
    const nb::gil_scoped_release free;
    return rows::restore(*store, *table, keys.data(),
                         reinterpret_cast<const char*>(records.data()), keys.size(),
                         data(touched));
  }
  size_t order(Array<int64_t> keys, Array<uint64_t> touched) const {
    const nb::gil_scoped_release free;
    return rows::order(*store, *table, keys.size(), keys.data(), touched.data());
  }
  size_t remove(Keys keys) const {
    const nb::gil_scoped_release free;
    return rows::remove(*store, *table, keys.data(), keys.size());
  }
  size_t evict(size_t n) const {
    const nb::gil_scoped_release free;
    const Borrowed worker(*store);
    return rows::evict(*store, *worker, *table, n, kIdle);
  }
  size_t oldest(Array<int64_t> keys, Array<uint64_t> stamps, Array<uint8_t> records) const {
    const nb::gil_scoped_release free;
    return rows::oldest(*store, *table, keys.size(), keys.data(), stamps.data(),
                        reinterpret_cast<char*>(records.data()));
  }
  size_t mark_spilled(Keys keys, Array<const uint64_t> stamps) const {
    const nb::gil_scoped_release free;
    return rows::mark_spilled(*store, *table, keys.data(), stamps.data(), keys.size());
  }
  size_t recall(Keys keys, Array<const uint64_t> stamps, Array<const uint8_t> records,
                Array<uint8_t> done) const {
    const nb::gil_scoped_release free;
    return rows::recall(*store, *table, keys.data(), stamps.data(),
                        reinterpret_cast<const char*>(records.data()), keys.size(), done.data());
  }
  void stamps(Keys keys, const HeldSnapshot* snapshot, Array<uint64_t> stamps,
              Array<uint64_t> on_disk) const {
    const SnapshotEntry* at = entry(snapshot);
    const nb::gil_scoped_release free;
    rows::stamps_of(*store, *table, keys.data(), keys.size(), at, stamps.data(), on_disk.data());
  }
  void alive(Keys keys, Array<uint8_t> alive) const {
    const nb::gil_scoped_release free;
    rows::alive_of(*store, *table, keys.data(), keys.size(), alive.data());
  }
  void initial(Keys keys, Array<float> out) const {
    const nb::gil_scoped_release free;
    for (size_t i = 0; i < keys.size(); ++i)
      table->init(keys.data()[i], out.data() + i * table->config.dim);
  }
  std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t> prune(uint64_t max_alive,
                                                                     Array<const float> weights) const {
    const size_t ages = weights.size() / table->config.chunks;
    if (!ages || weights.size() % table->config.chunks)
      throw std::invalid_argument("prune wants lines of a weight for each column of chunks");
    const nb::gil_scoped_release free;
    const auto r =
        rows::prune(*store, *table, max_alive, weights.data(), static_cast<uint32_t>(ages));
    return {r.rows, r.pruned, r.regrown, r.dropped, r.alive};
  }
  Stats stats() const {
    uint64_t slots = 0;
    for (const Segment& s : table->segments) slots += uint64_t{s.num_buckets} * 7;
    return {{"rows", table->rows.load()},
            {"alive_chunks", table->alive_chunks.load()},
            {"spilled_rows", table->spilled_rows.load()},
            {"slots", slots},
            {"index_bytes", table->index_bytes()},
            {"queue_bytes", table->recency.bytes()},
            {"row_bytes", table->full_bytes()},
            {"steps", table->steps.load()},
            {"epoch", table->epoch.load()}};
  }
};

std::shared_ptr<Store> make_store(size_t capacity, size_t slab, bool huge, size_t budget) {
  StoreConfig config;
  config.capacity = capacity;
  config.slab_bytes = slab;
  config.huge = huge;
  config.snapshot_budget = budget;
  return std::make_shared<Store>(config);
}

PyTable make_table(const std::shared_ptr<Store>& store, const std::string& name, uint32_t dim,
                   uint32_t chunks, int optimizer, std::tuple<double, double, double, double> rule,
                   int init, double mean, double scale, uint64_t seed, uint64_t max_rows, bool lru,
                   bool spill, uint64_t expected_rows, double decay, double utility_scale) {
  TableConfig c;
  c.name = name;
  c.dim = dim;
  c.chunks = chunks;
  c.optimizer = static_cast<Optimizer>(optimizer);
  std::tie(c.eps, c.beta1, c.beta2, c.initial_accumulator) = rule;
  c.init = static_cast<Init>(init);
  c.init_mean = mean;
  c.init_scale = scale;
  c.seed = seed;
  c.max_rows = max_rows;
  c.lru = lru;
  c.spill = spill;
  c.expected_rows = expected_rows;
  c.decay = decay;
  c.utility_scale = utility_scale;
  const nb::gil_scoped_release free;
  return {store, &store->add_table(std::move(c))};
}

Stats store_stats(const Store& store) {
  Stats s = {{"used_bytes", store.arena.used_bytes()},
             {"capacity", store.arena.capacity()},
             {"slab_bytes", store.arena.slab_bytes()},
             {"stamp", store.visible.load()},
             {"horizon", store.horizon()},
             {"growths", store.growths.load()},
             {"longest_pause_ns", store.longest_pause_ns.load()},
             {"snapshots_expired", store.snapshots_expired.load()},
             {"retired_bytes", store.retired_bytes()},
             {"base", reinterpret_cast<uint64_t>(store.arena.base())}};
  store.each_worker([&](const Worker& w) {
    const Counters& c = w.counters;
    s["commits"] += c.commits.load();
    s["conflicts"] += c.conflicts.load();
    s["full"] += c.full.load();
    s["pending"] += c.pending.load();
    s["resumes"] += c.resumes.load();
    s["batches"] += c.batches.load();
    s["probes"] += c.probes.load();
    s["evicted"] += c.evicted.load();
  });
  return s;
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.attr("ROWS_ABI") = 5;
  m.def("row_procedures", &procedure_names);
  nb::exception<SnapshotExpired>(m, "SnapshotExpired", PyExc_RuntimeError);

  nb::class_<HeldSnapshot>(m, "RowSnapshot")
      .def("close", &HeldSnapshot::close)
      .def_prop_ro("stamp", &HeldSnapshot::stamp);

  nb::class_<PyTable>(m, "RowTable")
      .def("multi_get", &PyTable::multi_get, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg().none(), nb::arg())
      .def("lookup", &PyTable::lookup, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg())
      .def("apply", &PyTable::apply, nb::arg().noconvert(), nb::arg().noconvert(), nb::arg(),
           nb::arg().none().noconvert(), nb::arg().noconvert())
      .def("run", &PyTable::run, nb::arg(), nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().none().noconvert(), nb::arg().none().noconvert(),
           nb::arg().none().noconvert(), nb::arg().none().noconvert(),
           nb::arg().none().noconvert(), nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg())
      .def("scan", &PyTable::scan, nb::arg().none(), nb::arg(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert())
      .def("restore", &PyTable::restore, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().none().noconvert())
      .def("order", &PyTable::order, nb::arg().noconvert(), nb::arg().noconvert())
      .def("remove", &PyTable::remove, nb::arg().noconvert())
      .def("evict", &PyTable::evict)
      .def("oldest", &PyTable::oldest, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert())
      .def("mark_spilled", &PyTable::mark_spilled, nb::arg().noconvert(), nb::arg().noconvert())
      .def("recall", &PyTable::recall, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg().noconvert())
      .def("stamps", &PyTable::stamps, nb::arg().noconvert(), nb::arg().none(),
           nb::arg().noconvert(), nb::arg().noconvert())
      .def("alive", &PyTable::alive, nb::arg().noconvert(), nb::arg().noconvert())
      .def("initial", &PyTable::initial, nb::arg().noconvert(), nb::arg().noconvert())
      .def("prune", &PyTable::prune)
      .def("stats", &PyTable::stats)
      .def("set_progress",
           [](const PyTable& t, uint64_t steps, uint32_t epoch) {
             t.table->steps.store(steps);
             t.table->epoch.store(epoch);
           })
      .def_prop_ro("record_bytes", [](const PyTable& t) { return record_bytes(*t.table); });

  nb::class_<Store>(m, "RowStore")
      .def_static("make", &make_store)
      .def_static("table", &make_table)
      .def_static("snapshot",
                  [](const std::shared_ptr<Store>& s) { return new HeldSnapshot(s); })
      .def("stats", &store_stats)
      .def("compact", [](Store& s) {
        const nb::gil_scoped_release free;
        return compact(s);
      });
}

}  // namespace ray_pipe
