// Words that every part of the row store uses: hashing, prefetching, half floats, test hooks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ray_pipe::rows {

// What became of a transaction. The values above `nonfinite` never leave the store: the runner
// makes room and tries again.
enum class Status : uint8_t { ok, conflict, full, pending, nonfinite, needs_index, needs_memory };

constexpr uint64_t kIdle = ~uint64_t{0};  // a registration that holds nothing back

// The empty statement is what keeps a prefetch: GCC takes a function that does nothing else for one
// without effect, and drops calls of it that it has not inlined yet.
inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 3);
  asm volatile("" : : "r"(p));
}
inline void prefetch_write(const void* p) {
  __builtin_prefetch(p, 1, 3);
  asm volatile("" : : "r"(p));
}

// Every line of [p, p + n): a row whose first line alone is fetched still misses on the rest.
inline void prefetch_lines(const void* p, size_t n) {
  const auto first = reinterpret_cast<uintptr_t>(p) & ~uintptr_t{63};
  const auto last = reinterpret_cast<uintptr_t>(p) + n;
  for (uintptr_t line = first; line < last; line += 64) prefetch(reinterpret_cast<const void*>(line));
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A bijection (the finaliser of SplitMix64), so no two keys of a table share a hash.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

inline uint64_t high_half(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// Half floats of values >= 0, to nearest even; saturates at 65504.
inline uint16_t half_of(float x) {
  if (!(x < 65504.0f)) return 0x7bff;
  if (x < 6.103515625e-05f) {  // subnormal: a multiple of 2^-24
    const float scaled = x * 16777216.0f;
    uint32_t whole = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(whole);
    whole += rest > 0.5f || (rest == 0.5f && (whole & 1));
    return static_cast<uint16_t>(whole);
  }
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>((bits >> 13) - (112u << 10));
}
inline float float_of(uint16_t half) {
  if (half < 0x400) return static_cast<float>(half) * 5.9604644775390625e-08f;
  const uint32_t bits = (static_cast<uint32_t>(half) + (112u << 10)) << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// --- hooks of the stress program ------------------------------------------------------------------
// MUTANT(name) is a rule broken on purpose, POINT() a place where a thread may be pushed off the
// core. Both vanish from the product.
#ifdef RAY_PIPE_ROWS_TESTING
enum class Mutant {
  none,
  head_recorded,            // a read of an older version counts as a read of the newest
  stamp_after_validation,   //
  unordered_publication,    //
  lane_deregisters,         // the first finished lane ends the registration of its batch
  no_read_validation,       //
  no_first_committer,       // the newest version may be newer than the snapshot
  only_last_committer,      // both of the above
  plain_unlock,             // the header is unlocked by a store, not by an addition
  insert_keeps_header,      // an insert does not bump the counter
  locked_header_counts,     // an absence that was read during an insert may be committed upon
  late_registration,        // a snapshot is registered after `visible` was read
  no_reservation,           // inserts do not reserve a slot first
  no_probe_bound,           // probes do not stop after one tour
  reused_slot_unchecked,    // a commit does not ask whose row the slot holds
  failed_unpublished,       // a failed validation keeps its stamp to itself
  first_candidate_only,     // a slot that was returned under a reader ends its search in a bucket
  lane_local_init,          // a new row is drawn from who makes it, not from its key
  cell_freed_twice,         // now and then
  cell_forgotten,           // now and then a cell is not given back
  snapshot_before_rows,     // a full store keeps its snapshots and refuses rows
  popped_before_commit,     // rows to be evicted leave the order of use before they are gone
};
extern std::atomic<Mutant> mutant;
void protocol_point();
bool allocation_fails();
uint64_t draw();  // of this thread's own dice
#define MUTANT(name) (::ray_pipe::rows::mutant.load(std::memory_order_relaxed) == \
                      ::ray_pipe::rows::Mutant::name)
#define POINT() ::ray_pipe::rows::protocol_point()
#define ALLOCATION_FAILS() ::ray_pipe::rows::allocation_fails()
#define DRAW() ::ray_pipe::rows::draw()
#else
#define MUTANT(name) false
#define POINT() static_cast<void>(0)
#define ALLOCATION_FAILS() false
#define DRAW() 0
#endif

}  // namespace ray_pipe::rows
