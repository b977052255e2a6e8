// 32 lanes at a time: the few vector operations that kernels.cpp is written in.
//
// GCC and Clang vector types, as wide as the instruction set of this compilation, so that plain
// operators compile to one instruction each; intrinsics only where there is no operator. Included
// by kernels.cpp inside a namespace of its own for each instruction set: nothing here may be
// shared between them, or the linker could choose the copy that this machine cannot run.

constexpr int kBlock = 32;

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kBlock / kWidth;

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Uints __attribute__((vector_size(kWidth * 4)));
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef uint64_t Words __attribute__((vector_size(32)));  // 32 bytes, or 8 codes in each word

#define RP_INLINE inline __attribute__((always_inline))

template <class V, class T>
RP_INLINE V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
RP_INLINE void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

RP_INLINE float as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
RP_INLINE uint32_t as_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

RP_INLINE Ints max(Ints a, Ints b) { return a > b ? a : b; }
RP_INLINE Ints min(Ints a, Ints b) { return a < b ? a : b; }

RP_INLINE uint32_t largest(Ints v) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_max_epi32((__m512i)v));
#else
  int32_t lanes[kWidth], best = 0;
  store(lanes, v);
  for (int i = 0; i < kWidth; ++i) best = lanes[i] > best ? lanes[i] : best;
  return static_cast<uint32_t>(best);
#endif
}

// The sign bits of the lanes, lane 0 in bit 0.
RP_INLINE uint32_t signs(Ints v) {
#if defined(__AVX512DQ__)
  return static_cast<uint32_t>(_mm512_movepi32_mask((__m512i)v));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)v));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)v));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kWidth; ++i) mask |= (static_cast<uint32_t>(v[i]) >> 31) << i;
  return mask;
#endif
}

RP_INLINE float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

// 32 lanes in 0..255 as 32 bytes, and back.
RP_INLINE Words join_bytes(const Ints (&v)[kParts]) {
#if defined(__AVX512F__)
  const __m128i low = _mm512_cvtepi32_epi8((__m512i)v[0]);
  const __m128i high = _mm512_cvtepi32_epi8((__m512i)v[1]);
  return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (Words)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
#else
  uint8_t bytes[kBlock];
  for (int p = 0; p < kParts; ++p) store(bytes + p * kWidth, __builtin_convertvector(v[p], Bytes));
  return load<Words>(bytes);
#endif
}

RP_INLINE void split_bytes(Words w, Ints (&v)[kParts]) {
#if defined(__AVX512F__)
  v[0] = (Ints)_mm512_cvtepu8_epi32(_mm256_castsi256_si128((__m256i)w));
  v[1] = (Ints)_mm512_cvtepu8_epi32(_mm256_extracti128_si256((__m256i)w, 1));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)w);
  const __m128i high = _mm256_extracti128_si256((__m256i)w, 1);
  v[0] = (Ints)_mm256_cvtepu8_epi32(low);
  v[1] = (Ints)_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8));
  v[2] = (Ints)_mm256_cvtepu8_epi32(high);
  v[3] = (Ints)_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8));
#else
  uint8_t bytes[kBlock];
  store(bytes, w);
  for (int p = 0; p < kParts; ++p)
    v[p] = __builtin_convertvector(load<Bytes>(bytes + p * kWidth), Ints);
#endif
}

// Lanes in 0..65535 as 16-bit values, and back.
RP_INLINE void store_halves(uint16_t* to, const Ints (&v)[kParts]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int p = 0; p < kParts; p += 2) {
    const __m256i packed = _mm256_packus_epi32((__m256i)v[p], (__m256i)v[p + 1]);
    store(to + p * kWidth, _mm256_permute4x64_epi64(packed, 0xd8));
  }
#else
  for (int p = 0; p < kParts; ++p) store(to + p * kWidth, __builtin_convertvector(v[p], Halves));
#endif
}

RP_INLINE Ints load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32(load<__m128i>(from));
#else
  return __builtin_convertvector(load<Halves>(from), Ints);
#endif
}

// bf16 is the upper half of an fp32; rounding to nearest even. For finite values.
RP_INLINE Floats widen(const uint16_t* from) { return (Floats)(load_halves(from) << 16); }
RP_INLINE Ints round_bf16(Floats v) {
  const Uints bits = (Uints)v;
  return (Ints)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// --- bit streams: 32 codes <-> 4*BITS bytes -----------------------------------------------------
//
// Eight byte-wide codes in a word become 8*BITS adjacent bits by merging neighbours three times
// (bytes to pairs, pairs to quads, quads to the whole), and back by the same steps reversed.
// Two, four and eight bits have shorter ways.

// BITS bytes from or to memory, not one more: two halves that may overlap.
template <int BITS>
RP_INLINE uint64_t load_word(const uint8_t* from) {
  if constexpr (BITS == 8) return load<uint64_t>(from);
  if constexpr (BITS >= 4)
    return load<uint32_t>(from) | uint64_t{load<uint32_t>(from + BITS - 4)} << 8 * (BITS - 4);
  if constexpr (BITS >= 2)
    return load<uint16_t>(from) | uint64_t{load<uint16_t>(from + BITS - 2)} << 8 * (BITS - 2);
  return *from;
}

template <int BITS>
RP_INLINE void store_word(uint8_t* to, uint64_t word) {
  if constexpr (BITS == 8) {
    store(to, word);
  } else if constexpr (BITS >= 4) {
    store(to, static_cast<uint32_t>(word));
    store(to + BITS - 4, static_cast<uint32_t>(word >> 8 * (BITS - 4)));
  } else if constexpr (BITS >= 2) {
    store(to, static_cast<uint16_t>(word));
    store(to + BITS - 2, static_cast<uint16_t>(word >> 8 * (BITS - 2)));
  } else {
    *to = static_cast<uint8_t>(word);
  }
}

template <int BITS>
RP_INLINE void pack(Words w, uint8_t* to) {
  if constexpr (BITS == 8) {
    store(to, w);
    return;
  }
#if defined(__AVX2__)
  if constexpr (BITS == 4) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi16(0x1001));
#if defined(__AVX512F__)
    store(to, _mm256_cvtepi16_epi8(pairs));
#else
    const __m256i bytes = _mm256_packus_epi16(pairs, pairs);
    store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0x08)));
#endif
    return;
  }
  if constexpr (BITS == 2) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi16(0x0401));
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
#if defined(__AVX512F__)
    store(to, _mm_cvtsi128_si64(_mm256_cvtepi32_epi8(quads)));
#else
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(quads),
                                           _mm256_extracti128_si256(quads, 1));
    store(to, _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
#endif
    return;
  }
#endif
  constexpr uint64_t low1 = 0x00ff00ff00ff00ff, low2 = 0x0000ffff0000ffff, low4 = 0xffffffff;
  w = (w & low1) | ((w & ~low1) >> (8 - BITS));
  w = (w & low2) | ((w & ~low2) >> 2 * (8 - BITS));
  w = (w & low4) | ((w & ~low4) >> 4 * (8 - BITS));
  for (int i = 0; i < 4; ++i) store_word<BITS>(to + i * BITS, w[i]);
}

template <int BITS>
RP_INLINE void unpack(const uint8_t* from, Ints (&codes)[kParts]) {
#if defined(__AVX2__)
  if constexpr (BITS <= 4) {  // eight codes fit 32 bits: copy to all lanes, shift each by its own
    constexpr int b = BITS;
#if defined(__AVX512F__)
    const __m512i by = _mm512_setr_epi32(0, b, 2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b, 0, b,
                                         2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b);
    for (int p = 0; p < kParts; ++p) {
      const int low = static_cast<int>(load_word<BITS>(from + 2 * p * BITS));
      const int high = static_cast<int>(load_word<BITS>(from + (2 * p + 1) * BITS));
      const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
      codes[p] = (Ints)_mm512_srlv_epi32(both, by) & ((1 << BITS) - 1);
    }
#else
    const __m256i by = _mm256_setr_epi32(0, b, 2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b);
    for (int p = 0; p < kParts; ++p) {
      const int word = static_cast<int>(load_word<BITS>(from + p * BITS));
      codes[p] = (Ints)_mm256_srlv_epi32(_mm256_set1_epi32(word), by) & ((1 << BITS) - 1);
    }
#endif
    return;
  }
#endif
  Words w;
  if constexpr (BITS == 8) {
    w = load<Words>(from);
  } else {
    constexpr uint64_t one = (1u << BITS) - 1, two = one | one << BITS;
    constexpr uint64_t low4 = two | two << 2 * BITS, low2 = two | two << 32;
    constexpr uint64_t low1 = (one | one << 16) | (one | one << 16) << 32;
    for (int i = 0; i < 4; ++i) w[i] = load_word<BITS>(from + i * BITS);
    w = (w & low4) | ((w & (low4 << 4 * BITS)) << 4 * (8 - BITS));
    w = (w & low2) | ((w & (low2 << 2 * BITS)) << 2 * (8 - BITS));
    w = (w & low1) | ((w & (low1 << BITS)) << (8 - BITS));
  }
  split_bytes(w, codes);
}
