#include "table.hpp"

#include <algorithm>
#include <cmath>

namespace ray_pipe::rows {

namespace {
constexpr uint32_t kLeastBuckets = 2;
uint32_t state_of(Optimizer o) {
  return o == Optimizer::adam ? 2 : o == Optimizer::adagrad ? 1 : 0;
}
}  // namespace

Table::Table(uint32_t id_, TableConfig config_, Arena& arena)
    : config(std::move(config_)), id(id_), recency(arena), arena_(arena) {
  salt_ = mix(config.seed * kGolden + name_hash(config.name));
  init_salt_ = mix(salt_ + kGolden);
  chunk_ = config.dim / config.chunks;
  state_ = state_of(config.optimizer);
  utility_bytes_ = config.chunks > 1 ? (2 * (config.chunks + 1) + 3) / 4 * 4 : 0;
  for (uint32_t alive = 0; alive <= config.chunks; ++alive) {
    classes_[alive] = arena.class_of(sizeof(Version) + payload_bytes(static_cast<int>(alive)));
    cell_bytes_[alive] = arena.cell_bytes(classes_[alive]);
  }
  header_class_ = arena.class_of(sizeof(Version));
  const float gamma = static_cast<float>(config.decay);
  for (float d = 1; decays_.size() < 4096 && d > 1e-12f; d *= gamma) decays_.push_back(d);
  const uint64_t slots = config.expected_rows / kSegments * 10 / 8;
  const auto buckets =
      std::clamp<uint64_t>(slots / 7 + slots / 70, kLeastBuckets, kMaxBuckets);
  std::vector<Version*> none;
  for (uint32_t s = 0; s < kSegments; ++s)
    if (!resize(s, static_cast<uint32_t>(buckets), 0, none)) throw std::bad_alloc();
}

Table::~Table() {
  for (Segment& s : segments) arena_.discharge(size_t{s.num_buckets} * sizeof(Bucket));
}

uint32_t Table::grown(uint32_t segment) const {
  const uint32_t now = segments[segment].num_buckets;
  return std::min(kMaxBuckets, now < 8192 ? now * 2 : now + now / 4);
}

size_t Table::index_bytes() const {
  size_t sum = 0;
  for (const Segment& s : segments) sum += size_t{s.num_buckets} * sizeof(Bucket);
  return sum;
}

size_t Table::newest_bytes() const {
  const uint64_t on_disk = spilled_rows.load(std::memory_order_relaxed);
  const uint64_t all = std::max(rows.load(std::memory_order_relaxed), on_disk);
  const uint64_t chunks = alive_chunks.load(std::memory_order_relaxed);
  return (all - on_disk) * cell_bytes_[0] + chunks * size_t{4} * stride() + on_disk * sizeof(Version);
}

bool Table::resize(uint32_t number, uint32_t num_buckets, uint64_t horizon,
                   std::vector<Version*>& dropped) {
  Segment& old = segments[number];
  if (num_buckets <= old.num_buckets) return false;
  const size_t bytes = size_t{num_buckets} * sizeof(Bucket);
  if (!arena_.charge(bytes)) return false;
  Segment fresh;
  fresh.memory = Mapping(bytes, arena_.huge());  // zeros
  fresh.buckets = reinterpret_cast<Bucket*>(fresh.memory.data());
  fresh.num_buckets = num_buckets;
  fresh.limit = static_cast<uint32_t>(uint64_t{num_buckets} * 7 * 4 / 5);

  const uint32_t words = old.num_buckets * 8;
  constexpr uint32_t kAhead = 32;
  constexpr auto relaxed = std::memory_order_relaxed;  // the gate orders everything here
  for (uint32_t i = 0; i < words; ++i) {
    if (i + kAhead < words && (i + kAhead) % 8)
      if (const uint64_t soon = old.slot(i + kAhead)->load(relaxed)) prefetch(version_of(soon));
    if (i % 8 == 0) continue;  // a header
    const uint64_t word = old.slot(i)->load(relaxed);
    if (!word) continue;
    Version* v = version_of(word);
    if (v->absent() && v->stamp() <= horizon) {
      dropped.push_back(v);
      continue;
    }
    uint32_t b = fresh.home(hash(v->key));
    for (bool placed = false; !placed; b = fresh.after(b)) {
      Bucket& bucket = fresh.buckets[b];
      for (Word& slot : bucket.slots) {
        if (slot.load(relaxed)) continue;
        slot.store(word, relaxed);
        fresh.used.fetch_add(1, relaxed);
        if (!v->spilled())
          recency.moved(v->recency.load(relaxed), number << 26 | fresh.number(&slot));
        placed = true;
        break;
      }
      if (!placed) bucket.header.store(bucket.header.load(relaxed) | kOverflow, relaxed);
    }
  }
  arena_.discharge(size_t{old.num_buckets} * sizeof(Bucket));
  old.memory = std::move(fresh.memory);
  old.buckets = fresh.buckets;
  old.num_buckets = fresh.num_buckets;
  old.limit = fresh.limit;
  old.used.store(fresh.used.load(relaxed), relaxed);
  return true;
}

Word* Table::find(uint64_t hash, int64_t key) {
  Segment& s = segment(hash);
  uint32_t b = s.home(hash);
  for (uint32_t probes = 0; probes < s.num_buckets; ++probes, b = s.after(b)) {
    Bucket& bucket = s.buckets[b];
    for (uint32_t found = matches(bucket, tag_of(hash)); found; found &= found - 1) {
      Word& slot = bucket.slots[__builtin_ctz(found)];
      const uint64_t word = slot.load(std::memory_order_acquire);
      if (word >> 48 == tag_of(hash) && version_of(word)->key == key) return &slot;
    }
    if (!(bucket.header.load(std::memory_order_acquire) & kOverflow)) break;
  }
  return nullptr;
}

// --- rows ---------------------------------------------------------------------------------------

// Counter based: element d of a row depends on (seed, table, key, d) and nothing else. `normal` is
// the sum of twelve 16 bit uniform numbers: exact integers, so every machine gets the same bits.
void Table::init(int64_t key, float* out) const {
  uint64_t row = mix(static_cast<uint64_t>(key) * kGolden + init_salt_);
  if (MUTANT(lane_local_init)) row = mix(row + DRAW());
  const float mean = static_cast<float>(config.init_mean);
  const float scale = static_cast<float>(config.init_scale);
  for (uint32_t d = 0; d < config.dim; ++d) {
    if (config.init == Init::zeros) {
      out[d] = mean;
    } else if (config.init == Init::uniform) {
      const auto r = static_cast<int32_t>(mix(row + d * kGolden) >> 40) - (1 << 23);
      out[d] = mean + scale * (static_cast<float>(r) * 0x1p-23f);
    } else {
      int32_t sum = -6 * 65535;
      for (uint64_t part = 0; part < 3; ++part) {
        const uint64_t r = mix(row + (3 * d + part) * kGolden);
        for (int shift = 0; shift < 64; shift += 16) sum += static_cast<int32_t>(r >> shift & 0xffff);
      }
      out[d] = mean + scale * (static_cast<float>(sum) * 0x1p-16f);
    }
  }
}

void Table::fresh_state(float* weights) const {
  const float first =
      config.optimizer == Optimizer::adagrad ? static_cast<float>(config.initial_accumulator) : 0;
  std::fill_n(weights + chunk_, size_t{chunk_} * state_, first);
}

void Table::fill(Version* fresh, int64_t key, const float* weights, uint8_t alive) const {
  fresh->set(0, alive);
  fresh->next = nullptr;
  fresh->key = key;
  fresh->accumulator = static_cast<float>(config.initial_accumulator);
  fresh->recency.store(kNoRecency, std::memory_order_relaxed);
  if (utility_bytes_) {
    std::memset(fresh->payload(), 0, utility_bytes_);
    const auto now = static_cast<uint16_t>(epoch.load(std::memory_order_relaxed));
    std::memcpy(fresh->payload(), &now, 2);
  }
  uint32_t rank = 0;
  for (uint32_t c = 0; c < config.chunks; ++c) {
    if (!(alive >> c & 1)) continue;
    float* to = chunk_at(fresh, rank++);
    std::memcpy(to, weights + size_t{c} * chunk_, size_t{4} * chunk_);
    fresh_state(to);
  }
}

void Table::rewrite(Version* fresh, const Version* old, const float* weights) const {
  fill(fresh, old->key, weights, old->alive());
  fresh->accumulator = old->accumulator;
  std::memcpy(fresh->payload(), old->payload(), utility_bytes_);
  const int chunks = __builtin_popcount(old->alive());
  for (int rank = 0; rank < chunks; ++rank)
    std::memcpy(chunk_at(fresh, rank) + chunk_, chunk_at(old, rank) + chunk_,
                size_t{4} * chunk_ * state_);
}

void Table::copy(Version* fresh, const Version* old) const {
  fresh->set(0, old->alive());
  fresh->next = nullptr;
  fresh->key = old->key;
  fresh->accumulator = old->accumulator;
  fresh->recency.store(kNoRecency, std::memory_order_relaxed);
  std::memcpy(fresh->payload(), old->payload(), payload_bytes(__builtin_popcount(old->alive())));
}

void Table::add(Version* fresh, const float* delta) const {
  uint32_t rank = 0;
  for (uint32_t c = 0; c < config.chunks; ++c, delta += chunk_) {
    if (!(fresh->alive() >> c & 1)) continue;
    float* w = chunk_at(fresh, rank++);
    for (uint32_t i = 0; i < chunk_; ++i) w[i] += delta[i];
  }
}

bool Table::link(const Version* v, int64_t& key) const {
  if (!(v->alive() & 1) || chunk_ < 2) return false;
  std::memcpy(&key, chunk_at(v, 0), 8);
  return true;
}

void Table::reshape(Version* fresh, const Version* old, uint8_t alive) const {
  const std::vector<float> zeros(config.dim, 0.0f);
  fill(fresh, old->key, zeros.data(), alive);
  fresh->accumulator = old->accumulator;
  // With the epoch that they are of: a cut is no use of the row.
  std::memcpy(fresh->payload(), old->payload(), utility_bytes_);
  uint32_t from = 0, to = 0;
  for (uint32_t c = 0; c < config.chunks; ++c) {
    const bool had = old->alive() >> c & 1, has = alive >> c & 1;
    if (had && has) std::memcpy(chunk_at(fresh, to), chunk_at(old, from), size_t{4} * stride());
    from += had;
    to += has;
  }
}

float Table::decay_since(uint32_t before) const {
  const uint32_t passed = (epoch.load(std::memory_order_relaxed) - before) & 0xffff;
  return passed < decays_.size() ? decays_[passed] : 0.0f;
}

void Table::utilities(const Version* v, uint16_t* out) const {
  const auto* stored = reinterpret_cast<const uint16_t*>(v->payload());
  const float decay = decay_since(stored[0]);
  for (uint32_t c = 0; c < config.chunks; ++c) out[c] = half_of(float_of(stored[1 + c]) * decay);
}

uint32_t Table::idle_periods(const Version* v) const {
  uint16_t before;
  std::memcpy(&before, v->payload(), 2);
  const uint32_t passed = (epoch.load(std::memory_order_relaxed) - before) & 0xffff;
  return passed > 0 ? passed - 1 : 0;
}

}  // namespace ray_pipe::rows
