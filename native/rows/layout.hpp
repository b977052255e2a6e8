// The shape of a table in memory.
//
//   bucket 64 B   header (lock 1, overflow 1, counter) | 7 slots
//   slot    8 B   tag 16 | address of the newest version | lock 1        chain head and row lock
//   version       stamp 48, flags 16 | next | key | accumulator 4, recency 4 | payload
//
// A version never changes once it can be reached, but for `recency`. A table has 64 segments (top
// bits of the hash), so that it grows in 64 short pauses. Within a segment a bucket that is full
// overflows into the next.
#pragma once

#include "memory.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ray_pipe::rows {

using Word = std::atomic<uint64_t>;

constexpr uint64_t kLock = 1;
constexpr uint64_t kOverflow = 2;       // in a header: a key of this home may live further on
constexpr uint64_t kCount = 4;          // in a header: one insert
constexpr uint64_t kAddress = 0x0000fffffffffff8u;

constexpr uint16_t kAlive = 0x00ff;     // in flags: which chunks the row has
constexpr uint16_t kTombstone = 0x100;  // absent
constexpr uint16_t kPlaceholder = 0x200;  // with kTombstone: a slot taken by an insert under way
constexpr uint16_t kSpilled = 0x400;    // the row is on disk; `stamp_on_disk` says which

constexpr uint32_t kNoRecency = ~uint32_t{0};

struct Version {
  uint64_t stamp_flags;
  Version* next;
  int64_t key;
  float accumulator;
  std::atomic<uint32_t> recency;

  uint64_t stamp() const { return stamp_flags >> 16; }
  uint16_t flags() const { return static_cast<uint16_t>(stamp_flags); }
  uint8_t alive() const { return static_cast<uint8_t>(stamp_flags & kAlive); }
  bool absent() const { return stamp_flags & kTombstone; }
  bool spilled() const { return stamp_flags & kSpilled; }
  // Of a spilled row: the stamp of the version that was written to disk.
  uint64_t disk_stamp() const {
    uint64_t stamp;
    std::memcpy(&stamp, reinterpret_cast<const char*>(this) + 24, 8);
    return stamp;
  }
  void set_disk_stamp(uint64_t stamp) {
    std::memcpy(reinterpret_cast<char*>(this) + 24, &stamp, 8);
  }
  void set(uint64_t stamp, uint16_t flags) { stamp_flags = stamp << 16 | flags; }
  char* payload() { return reinterpret_cast<char*>(this + 1); }
  const char* payload() const { return reinterpret_cast<const char*>(this + 1); }
};
static_assert(sizeof(Version) == 32);

struct alignas(64) Bucket {
  Word header;
  Word slots[7];
};
static_assert(sizeof(Bucket) == 64);

inline Version* version_of(uint64_t word) { return reinterpret_cast<Version*>(word & kAddress); }
inline uint64_t word_of(uint64_t tag, const Version* v) {
  return tag << 48 | reinterpret_cast<uint64_t>(v);
}
inline uint64_t tag_of(uint64_t hash) {
  const uint64_t tag = hash & 0xffff;
  return tag ? tag : 1;
}

// The slots of a bucket that carry this tag, as bits. Who follows one loads its word again and
// compares: these are hints that never miss a slot published before the call.
#if defined(__x86_64__)
// Pairs of words at a time. The halves of an aligned load are whole on every x86-64, and loads
// acquire. The thread sanitiser cannot know, and does not look at these loads: what is read through
// a hit is ordered by the atomic load that follows it, which it does look at.
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread"), noinline))
#endif
inline uint32_t matches(const Bucket& bucket, uint64_t tag) {
  const auto* words = reinterpret_cast<const volatile __m128i*>(&bucket);
  const auto tops = [](__m128i a, __m128i b) {  // the four tags, each as a signed 32 bit number
    const __m128 high = _mm_shuffle_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b), 0xdd);
    return _mm_srai_epi32(_mm_castps_si128(high), 16);
  };
  const __m128i a = words[0], b = words[1], c = words[2], d = words[3];
  const __m128i tags = _mm_packs_epi32(tops(a, b), tops(c, d));  // of 16 bits: nothing saturates
  const __m128i same = _mm_cmpeq_epi16(tags, _mm_set1_epi16(static_cast<int16_t>(tag)));
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(same, _mm_setzero_si128()))) >> 1;
}
#else
inline uint32_t matches(const Bucket& bucket, uint64_t tag) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < 7; ++i)
    found |= static_cast<uint32_t>((bucket.slots[i].load(std::memory_order_acquire) >> 48) == tag)
             << i;
  return found;
}
#endif

constexpr uint32_t kSegments = 64;
constexpr uint32_t kMaxBuckets = 1u << 23;  // of a segment: a slot's number has 32 bits

struct Segment {
  Bucket* buckets = nullptr;
  uint32_t num_buckets = 0;
  uint32_t limit = 0;              // of reserved slots: 0.80 of all
  std::atomic<uint32_t> used{0};   // reserved slots
  Mapping memory;

  uint32_t home(uint64_t hash) const {
    return static_cast<uint32_t>(high_half(hash << 6, num_buckets));
  }
  uint32_t after(uint32_t bucket) const { return bucket + 1 == num_buckets ? 0 : bucket + 1; }

  // A slot's number within its segment: its distance from the start, in words.
  uint32_t number(const Word* slot) const {
    return static_cast<uint32_t>(slot - reinterpret_cast<const Word*>(buckets));
  }
  Word* slot(uint32_t number) const { return reinterpret_cast<Word*>(buckets) + number; }

  bool reserve() {
    if (used.fetch_add(1, std::memory_order_relaxed) < limit || MUTANT(no_reservation)) return true;
    release();
    return false;
  }
  void release() { used.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace ray_pipe::rows
