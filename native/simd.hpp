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
#define RP_INLINE_LAMBDA __attribute__((always_inline))

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

// A store, or one past the caches: of a whole vector, to where such a vector is aligned.
template <bool STREAMED, class V, class T>
RP_INLINE void put(T* to, V v) {
#if defined(__AVX512F__)
  if constexpr (STREAMED && sizeof v == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
#endif
#if defined(__AVX2__)
  if constexpr (STREAMED && sizeof v == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
#endif
#if defined(__SSE2__)
  if constexpr (STREAMED && sizeof v == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)v);
#endif
  store(to, v);
}

// Whoever reads after this sees what was put past the caches.
RP_INLINE void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
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

// The largest lane of `a` and that of `b`; lanes are not negative.
RP_INLINE void largest(Ints a, Ints b, int32_t* most_a, int32_t* most_b) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256i a8 = _mm256_max_epi32(_mm512_castsi512_si256((__m512i)a),
                                      _mm512_extracti64x4_epi64((__m512i)a, 1));
  const __m256i b8 = _mm256_max_epi32(_mm512_castsi512_si256((__m512i)b),
                                      _mm512_extracti64x4_epi64((__m512i)b, 1));
#else
  const __m256i a8 = (__m256i)a, b8 = (__m256i)b;
#endif
  const __m128i a4 = _mm_max_epi32(_mm256_castsi256_si128(a8), _mm256_extracti128_si256(a8, 1));
  const __m128i b4 = _mm_max_epi32(_mm256_castsi256_si128(b8), _mm256_extracti128_si256(b8, 1));
  const __m128i ab = _mm_max_epi32(_mm_unpacklo_epi64(a4, b4), _mm_unpackhi_epi64(a4, b4));
  const __m128i most = _mm_max_epi32(ab, _mm_shuffle_epi32(ab, 0xb1));
  *most_a = _mm_cvtsi128_si32(most);
  *most_b = _mm_extract_epi32(most, 2);
#else
  int32_t lanes_a[kWidth], lanes_b[kWidth];
  store(lanes_a, a);
  store(lanes_b, b);
  *most_a = *most_b = 0;
  for (int i = 0; i < kWidth; ++i) {
    *most_a = lanes_a[i] > *most_a ? lanes_a[i] : *most_a;
    *most_b = lanes_b[i] > *most_b ? lanes_b[i] : *most_b;
  }
#endif
}

#if defined(__FMA__) || defined(__AVX512F__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

// x / y rounded as one division is, given y's rounded reciprocal: one step of Markstein's method,
// which is exact as long as nothing over- or underflows (see kUsualScale in kernels.cpp) and the
// significand of y is not all ones (it is a bf16 or a small integer).
RP_INLINE Floats quotient(Floats x, float y, [[maybe_unused]] float reciprocal) {
#if defined(__AVX512F__)
  const __m512 r = _mm512_set1_ps(reciprocal), first = _mm512_mul_ps((__m512)x, r);
  const __m512 rest = _mm512_fnmadd_ps(first, _mm512_set1_ps(y), (__m512)x);
  return (Floats)_mm512_fmadd_ps(rest, r, first);
#elif defined(__FMA__)
  const __m256 r = _mm256_set1_ps(reciprocal), first = _mm256_mul_ps((__m256)x, r);
  const __m256 rest = _mm256_fnmadd_ps(first, _mm256_set1_ps(y), (__m256)x);
  return (Floats)_mm256_fmadd_ps(rest, r, first);
#else
  return x / y;
#endif
}

// Entry `index % kTable` of a table, where the instruction set has one instruction for it.
#if defined(__AVX512F__)
constexpr int kTable = 16;
RP_INLINE Floats lookup(Floats table, Ints index) {
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
}
#else
constexpr int kTable = 0;
RP_INLINE Floats lookup(Floats table, Ints) { return table; }
#endif

// x*y + z, rounded twice or once: for products that are exact, where both are the same.
RP_INLINE Floats exact_product_plus(Floats x, float y, float z) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(y), _mm512_set1_ps(z));
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(y), _mm256_set1_ps(z));
#else
  return x * y + z;
#endif
}

RP_INLINE Floats exact_product_plus(Floats x, float y, Floats z) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(y), (__m512)z);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(y), (__m256)z);
#else
  return x * y + z;
#endif
}

// total + x*x; for sums that need not be the same to the bit.
RP_INLINE Floats add_square(Floats total, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)x, (__m512)total);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)x, (__m256)total);
#else
  return total + x * x;
#endif
}

RP_INLINE float sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[kWidth];
  store(lanes, v);
  for (int width = kWidth / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
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
#elif defined(__SSE2__)
  Words w;
  for (int half = 0; half < 2; ++half) {
    const __m128i a = _mm_packs_epi32((__m128i)v[4 * half], (__m128i)v[4 * half + 1]);
    const __m128i b = _mm_packs_epi32((__m128i)v[4 * half + 2], (__m128i)v[4 * half + 3]);
    const __m128i bytes = _mm_packus_epi16(a, b);
    w[2 * half] = static_cast<uint64_t>(_mm_cvtsi128_si64(bytes));
    w[2 * half + 1] = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(bytes, bytes)));
  }
  return w;
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
#elif defined(__SSE2__)
  const __m128i zero = _mm_setzero_si128();
  for (int i = 0; i < 4; ++i) {
    const __m128i halves =
        _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<long long>(w[i])), zero);
    v[2 * i] = (Ints)_mm_unpacklo_epi16(halves, zero);
    v[2 * i + 1] = (Ints)_mm_unpackhi_epi16(halves, zero);
  }
#else
  uint8_t bytes[kBlock];
  store(bytes, w);
  for (int p = 0; p < kParts; ++p)
    v[p] = __builtin_convertvector(load<Bytes>(bytes + p * kWidth), Ints);
#endif
}

#if defined(__AVX512F__)
// Word 2i+1 of part p is word 16p+i of the source.
struct Halves32 {
  uint16_t index[2][32] = {};
  constexpr Halves32() {
    for (int p = 0; p < 2; ++p)
      for (int i = 0; i < 32; ++i) index[p][i] = static_cast<uint16_t>(16 * p + i / 2);
  }
};

// Every second one of 64 words.
template <int FIRST>
struct Alternate {
  uint16_t index[32] = {};
  constexpr Alternate() {
    for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(2 * i + FIRST);
  }
};
#endif

// bf16 is the upper half of an fp32: 32 of them, widened.
RP_INLINE void widen(const uint16_t* from, Floats (&v)[kParts]) {
#if defined(__AVX512F__)
  alignas(64) static constexpr Halves32 spread;
  const __m512i all = load<__m512i>(from);
  for (int p = 0; p < kParts; ++p)
    v[p] = (Floats)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, load<__m512i>(spread.index[p]), all);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p)
    v[p] = (Floats)((Ints)_mm256_cvtepu16_epi32(load<__m128i>(from + p * kWidth)) << 16);
#elif defined(__SSE2__)
  for (int p = 0; p < kParts; ++p)
    v[p] = (Floats)_mm_unpacklo_epi16(
        _mm_setzero_si128(), _mm_cvtsi64_si128(load<long long>(from + p * kWidth)));
#else
  for (int p = 0; p < kParts; ++p)
    v[p] = (Floats)(__builtin_convertvector(load<Halves>(from + p * kWidth), Ints) << 16);
#endif
}

// Rounded to bf16, nearest even. For finite values.
template <bool STREAMED>
RP_INLINE void store_bf16(uint16_t* to, const Floats (&v)[kParts]) {
#if defined(__AVX512F__)
  // In 16 bits, once for both parts: up where the lower half is above a half, or a half and odd.
  alignas(64) static constexpr Alternate<1> odd;
  alignas(64) static constexpr Alternate<0> even;
  const __m512i low = (__m512i)v[0], high = (__m512i)v[1];
  const __m512i upper = _mm512_permutex2var_epi16(low, load<__m512i>(odd.index), high);
  const __m512i lower = _mm512_permutex2var_epi16(low, load<__m512i>(even.index), high);
  constexpr int or_of_half_and_even = 0xce;  // 0x8000 | (~upper & 1)
  const __m512i least = _mm512_ternarylogic_epi32(
      upper, _mm512_set1_epi16(INT16_MIN), _mm512_set1_epi16(1), or_of_half_and_even);
  const __mmask32 up = _mm512_cmpge_epu16_mask(lower, least);
  put<STREAMED>(to, _mm512_mask_add_epi16(upper, up, upper, _mm512_set1_epi16(1)));
#else
  Uints bits[kParts];
  for (int p = 0; p < kParts; ++p)
    bits[p] = (Uints)v[p] + 0x7fff + (((Uints)v[p] >> 16) & 1);
#if defined(__AVX2__)
  for (int p = 0; p < kParts; p += 2) {
    const __m256i packed =
        _mm256_packus_epi32((__m256i)(bits[p] >> 16), (__m256i)(bits[p + 1] >> 16));
    put<STREAMED>(to + p * kWidth, _mm256_permute4x64_epi64(packed, 0xd8));
  }
#elif defined(__SSE2__)
  for (int p = 0; p < kParts; p += 2)  // shifted with its sign a half survives a signed packing
    put<STREAMED>(to + p * kWidth, _mm_packs_epi32((__m128i)((Ints)bits[p] >> 16),
                                           (__m128i)((Ints)bits[p + 1] >> 16)));
#else
  for (int p = 0; p < kParts; ++p)
    put<STREAMED>(to + p * kWidth, __builtin_convertvector(bits[p] >> 16, Halves));
#endif
#endif
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

#if defined(__AVX512F__)
// For each of 32 lanes: how far up its code lies in the four bytes that its octet is read from.
// An octet starts at byte BITS*octet; the last ones are read a little earlier, to stay inside.
template <int BITS>
struct Octets {
  int start[4] = {};
  int32_t shifts[kBlock] = {};

  constexpr Octets() {
    for (int octet = 0; octet < 4; ++octet) {
      start[octet] = BITS * octet < 4 * BITS - 4 ? BITS * octet : 4 * BITS - 4;
      for (int i = 0; i < 8; ++i)
        shifts[8 * octet + i] = 8 * (BITS * octet - start[octet]) + i * BITS;
    }
  }
};
#elif defined(__AVX2__)
// For each of 32 lanes: which bytes of the stream hold its code, and how far up it lies in them.
template <int BITS>
struct Spread {
  uint8_t bytes[4 * kBlock] = {};
  int32_t shifts[kWidth] = {};

  constexpr Spread() {
    for (int lane = 0; lane < kBlock; ++lane) {
      const int bit = lane * BITS, last = (bit + BITS - 1) / 8;
      bytes[4 * lane] = static_cast<uint8_t>(bit / 8);
      bytes[4 * lane + 1] = last > bit / 8 ? static_cast<uint8_t>(last) : 0x80;  // 0x80: a zero
      bytes[4 * lane + 2] = bytes[4 * lane + 3] = 0x80;
      shifts[lane % kWidth] = bit % 8;  // the same in each part: 8 lanes are whole bytes
    }
  }
};

// The 4*BITS bytes of 32 codes, not one byte more.
template <int BITS>
RP_INLINE __m128i load_stream(const uint8_t* from) {
  if constexpr (BITS == 4) return load<__m128i>(from);
  if constexpr (BITS == 3)
    return _mm_insert_epi32(_mm_cvtsi64_si128(load<long long>(from)), load<int>(from + 8), 2);
  if constexpr (BITS == 2) return _mm_cvtsi64_si128(load<long long>(from));
  return _mm_cvtsi32_si128(load<int>(from));
}
#endif

// 32 codes. Where they are looked up in a table of kTable entries, higher bits may be set.
template <int BITS>
RP_INLINE void unpack(const uint8_t* from, Ints (&codes)[kParts]) {
#if defined(__AVX512F__)
  if constexpr (BITS <= 4) {  // loads spread the bytes over the lanes; a shift is all that is left
    static_assert(kTable % (1 << BITS) == 0, "a lookup ignores the bits above the code");
    static constexpr Octets<BITS> octets;
    for (int p = 0; p < kParts; ++p) {
      const auto spread = [&](int octet) {
        return _mm_cvtsi32_si128(load<int>(from + octets.start[octet]));
      };
      __m512i bytes = _mm512_broadcastd_epi32(spread(2 * p));
      if (octets.start[2 * p] != octets.start[2 * p + 1])
        bytes = _mm512_mask_broadcastd_epi32(bytes, 0xff00, spread(2 * p + 1));
      codes[p] = (Ints)_mm512_srlv_epi32(bytes, load<__m512i>(octets.shifts + kWidth * p));
    }
    return;
  }
  if constexpr (BITS == 8) {
    for (int p = 0; p < kParts; ++p)
      codes[p] = (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from + kWidth * p));
    return;
  }
#elif defined(__AVX2__)
  if constexpr (BITS <= 4) {  // give each lane the two bytes its code is in, and shift it down
    alignas(64) static constexpr Spread<BITS> spread;
    const __m128i stream = load_stream<BITS>(from);
    for (int p = 0; p < kParts; ++p) {
      const __m256i pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(stream),
                                                load<__m256i>(spread.bytes + 4 * kWidth * p));
      codes[p] = (Ints)_mm256_srlv_epi32(pairs, load<__m256i>(spread.shifts));
      codes[p] &= (1 << BITS) - 1;
    }
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

// 32 codes less `full`, as floats.
template <int BITS>
RP_INLINE void centred(const uint8_t* from, Floats (&v)[kParts]) {
  constexpr float full = 1 << (BITS - 1);
#if defined(__AVX2__)
  if constexpr (BITS == 8) {  // less 128 is the other sign bit: cheaper in bytes than in floats
    for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
      const __m128i bytes = _mm_xor_si128(load<__m128i>(from + kWidth * p), _mm_set1_epi8(INT8_MIN));
      v[p] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
      const __m128i bytes = _mm_xor_si128(_mm_cvtsi64_si128(load<long long>(from + kWidth * p)),
                                          _mm_set1_epi8(INT8_MIN));
      v[p] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
    }
    return;
  }
#endif
  Ints codes[kParts];
  unpack<BITS>(from, codes);
  for (int p = 0; p < kParts; ++p) v[p] = __builtin_convertvector(codes[p], Floats) - full;
}
