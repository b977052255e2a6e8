// A table: what its rows are made of, how they begin and how they learn.
//
// Payload of a row with k chunks: [epoch, k utilities as half floats, only if k > 1] then for each
// chunk that is alive its weights and its own optimizer state. The row-wise accumulator is in the
// version's header. Pruned chunks read as zeros.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "layout.hpp"
#include "recency.hpp"

namespace ray_pipe::rows {

enum class Optimizer : uint8_t { none, sgd, adagrad, row_adagrad, adam };
enum class Init : uint8_t { zeros, uniform, normal };

struct TableConfig {
  std::string name;
  uint32_t dim = 0;
  uint32_t chunks = 1;
  Optimizer optimizer = Optimizer::none;
  double eps = 0, beta1 = 0, beta2 = 0, initial_accumulator = 0;
  Init init = Init::zeros;
  double init_mean = 0, init_scale = 0;
  uint64_t seed = 0;
  uint64_t max_rows = 0;       // 0: as many as the store's capacity holds
  bool lru = false;            // make room by evicting the least recently used row
  bool spill = false;          // evicted rows are written below by the caller first
  uint64_t expected_rows = 0;  // slots made at the start
  double decay = 0.98;         // of utilities, for each prune
  double utility_scale = 4096;  // utilities are kept times this: half floats end at 6e-8
};

// The numbers of one optimizer step, rounded to fp32 as torch rounds its scalars.
struct StepNumbers {
  float minus_lr = 0, eps = 0, one_minus_beta1 = 0, one_minus_beta2 = 0;
};

class Table {
 public:
  Table(uint32_t id, TableConfig config, Arena& arena);
  ~Table();

  const TableConfig config;
  const uint32_t id;
  Segment segments[kSegments];
  Recency recency;
  std::atomic<uint64_t> rows{0}, alive_chunks{0}, spilled_rows{0};
  std::atomic<uint64_t> steps{0};   // optimizer steps: Adam's bias correction, and the version
  std::atomic<uint32_t> epoch{0};   // prunes so far

  // Changes the size of a segment; only while no batch is open. False at the cap.
  bool resize(uint32_t segment, uint32_t num_buckets, uint64_t horizon,
              std::vector<Version*>& dropped);
  uint32_t grown(uint32_t segment) const;

  uint64_t hash(int64_t key) const { return mix(static_cast<uint64_t>(key) + salt_); }
  Segment& segment(uint64_t hash) { return segments[hash >> 58]; }
  uint32_t slot_number(uint64_t hash, const Word* slot) {
    return static_cast<uint32_t>(hash >> 58) << 26 | segment(hash).number(slot);
  }
  Word* slot_at(uint32_t number) { return segments[number >> 26].slot(number & 0x03ffffff); }

  // The slot of a key, or nullptr; wants an open batch.
  Word* find(uint64_t hash, int64_t key);

  // --- rows -------------------------------------------------------------------------------------
  uint8_t all_chunks() const { return static_cast<uint8_t>((1u << config.chunks) - 1); }
  uint32_t chunk_floats() const { return chunk_; }
  uint32_t stride() const { return chunk_ * (1 + state_); }  // floats of a chunk with its state
  uint32_t state_floats() const { return state_; }           // per weight
  size_t payload_bytes(int alive) const { return utility_bytes_ + size_t{4} * stride() * alive; }
  int class_of(uint16_t flags) const {
    return flags & (kTombstone | kSpilled) ? header_class_ : classes_[__builtin_popcount(flags & kAlive)];
  }
  size_t cell_bytes(int alive) const { return cell_bytes_[alive]; }
  size_t full_bytes() const { return cell_bytes_[config.chunks]; }
  bool evicts() const { return config.lru && !config.spill; }
  // Of the newest versions of all rows, and of the markers of those on disk.
  size_t newest_bytes() const;
  size_t index_bytes() const;
  size_t utility_bytes() const { return utility_bytes_; }

  inline void read(const Version* v, float* out) const;
  void init(int64_t key, float* out) const;
  // A new row with these weights and fresh state.
  void fill(Version* fresh, int64_t key, const float* weights, uint8_t alive) const;
  // The same row with other weights.
  void rewrite(Version* fresh, const Version* old, const float* weights) const;
  // The same row, to be changed before it is installed.
  void copy(Version* fresh, const Version* old) const;
  void add(Version* fresh, const float* delta) const;
  // A row that names another: the first eight bytes of its weights.
  bool link(const Version* v, int64_t& key) const;
  // The same row with other chunks: those that come back are zero, with fresh state.
  void reshape(Version* fresh, const Version* old, uint8_t alive) const;
  // One optimizer step on the alive chunks; `count` is how often the row occurred.
  void optimize(Version* fresh, const Version* old, const float* gradient, float count,
                const StepNumbers& step) const;
  StepNumbers numbers(double lr, uint64_t step) const;

  // Utilities as of now, decayed by the prunes since they were written, as half floats.
  void utilities(const Version* v, uint16_t* out) const;
  // Whole periods between prunes without a step on the row: 0 if it learned in the last one.
  uint32_t idle_periods(const Version* v) const;

 private:
  float* chunk_at(Version* v, uint32_t rank) const {
    return reinterpret_cast<float*>(v->payload() + utility_bytes_) + size_t{rank} * stride();
  }
  const float* chunk_at(const Version* v, uint32_t rank) const {
    return reinterpret_cast<const float*>(v->payload() + utility_bytes_) + size_t{rank} * stride();
  }
  void fresh_state(float* weights) const;
  float decay_since(uint32_t epoch) const;

  Arena& arena_;
  uint64_t salt_, init_salt_;
  uint32_t chunk_, state_;
  size_t utility_bytes_;
  int classes_[9] = {};
  size_t cell_bytes_[9] = {};
  int header_class_;
  std::vector<float> decays_;  // decay^n until it no longer matters
};

inline void Table::read(const Version* v, float* out) const {
  const uint8_t alive = v->alive();
  if (alive == 1 && config.chunks == 1) {
    std::memcpy(out, chunk_at(v, 0), size_t{4} * chunk_);
    return;
  }
  uint32_t rank = 0;
  for (uint32_t c = 0; c < config.chunks; ++c, out += chunk_) {
    if (alive >> c & 1) std::memcpy(out, chunk_at(v, rank++), size_t{4} * chunk_);
    else std::memset(out, 0, size_t{4} * chunk_);
  }
}

inline uint64_t name_hash(const std::string& name) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return h;
}

}  // namespace ray_pipe::rows
