// CRC-32 (the polynomial of zlib, gzip and Ethernet) as fast as memory is read.
//
// A message is a polynomial over GF(2) and its CRC the remainder modulo P. Sixteen bytes are folded
// onto the sixteen that lie D bits behind them by two carry-less products with x^D mod P, which leaves
// the remainder as it is; four such lanes run at once, or sixteen in four wide registers. What is left in the end, sixteen bytes and
// a tail, goes through a table, which is all there is on a machine without carry-less products.
//
// Bits are reflected: bit 0 of a lane is its highest power. A 64-bit half times a constant k that
// is stored as its 32 reflected bits shifted left by one is the half times k·x^32, so the
// constant for x^E is x^(E-32) mod P.
#include <array>
#include <cstddef>
#include <cstdint>

#include <nanobind/nanobind.h>

#include "bind.hpp"

#ifdef RAY_PIPE_X86
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace ray_pipe {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320u;  // P, reflected, without x^32

constexpr std::uint32_t times_x(std::uint32_t value) {
  return (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
}

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[byte] = value;
  }
  return table;
}

constexpr auto kTable = make_table();

std::uint32_t by_table(std::uint32_t state, const std::uint8_t* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; ++i) state = kTable[(state ^ data[i]) & 0xFF] ^ (state >> 8);
  return state;
}

#ifdef RAY_PIPE_X86

constexpr std::uint64_t power(int exponent) {  // x^exponent mod P, as the products want it
  std::uint32_t value = 0x80000000u;
  for (int i = 0; i < exponent; ++i) value = times_x(value);
  return std::uint64_t{value} << 1;
}

// The factors that move the low half (the higher powers) and the high half by so many bits.
#define RAY_PIPE_FOLD_BY(bits) \
  _mm_set_epi64x(static_cast<long long>(power((bits)-32)), static_cast<long long>(power((bits) + 32)))

constexpr int kLanes = 4;
constexpr std::size_t kStride = 16 * kLanes;

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i by,
                                                             __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_folding(std::uint32_t state,
                                                                  const std::uint8_t* data,
                                                                  std::size_t nbytes) {
  const auto load = [](const std::uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  __m128i lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = load(data + 16 * lane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  data += kStride;
  nbytes -= kStride;
  const __m128i stride = RAY_PIPE_FOLD_BY(8 * 64);
  for (; nbytes >= kStride; data += kStride, nbytes -= kStride)
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] = fold(lanes[lane], stride, load(data + 16 * lane));
  const __m128i step = RAY_PIPE_FOLD_BY(8 * 16);
  __m128i all = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) all = fold(all, step, lanes[lane]);
  for (; nbytes >= 16; data += 16, nbytes -= 16) all = fold(all, step, load(data));
  alignas(16) std::uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), all);
  return by_table(by_table(0, rest, 16), data, nbytes);
}

#define RAY_PIPE_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
constexpr std::size_t kWide = 4 * 64;

RAY_PIPE_WIDE inline __m512i fold(__m512i value, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(value, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(value, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the xor of all three
}

// Leaves the 64 bytes that stand for all it has read, and goes on with them by the narrow lanes.
RAY_PIPE_WIDE std::uint32_t by_wide_folding(std::uint32_t state, const std::uint8_t* data,
                                            std::size_t nbytes) {
  __m512i lanes[4];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] = _mm512_loadu_si512(data + 64 * lane);
  lanes[0] = _mm512_xor_si512(
      lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  data += kWide;
  nbytes -= kWide;
  const __m512i stride = _mm512_broadcast_i32x4(RAY_PIPE_FOLD_BY(8 * 256));
  for (; nbytes >= kWide; data += kWide, nbytes -= kWide)
    for (int lane = 0; lane < 4; ++lane)
      lanes[lane] = fold(lanes[lane], stride, _mm512_loadu_si512(data + 64 * lane));
  const __m512i step = _mm512_broadcast_i32x4(RAY_PIPE_FOLD_BY(8 * 64));
  __m512i all = lanes[0];
  for (int lane = 1; lane < 4; ++lane) all = fold(all, step, lanes[lane]);
  for (; nbytes >= 64; data += 64, nbytes -= 64) all = fold(all, step, _mm512_loadu_si512(data));
  alignas(64) std::uint8_t rest[64];
  _mm512_store_si512(rest, all);
  return by_table(by_folding(0, rest, 64), data, nbytes);
}

bool can_fold_wide() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  return can;
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#else

constexpr std::size_t kStride = 0;
#define RAY_PIPE_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
constexpr std::size_t kWide = 4 * 64;

RAY_PIPE_WIDE inline __m512i fold(__m512i value, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(value, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(value, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the xor of all three
}

// Leaves the 64 bytes that stand for all it has read, and goes on with them by the narrow lanes.
RAY_PIPE_WIDE std::uint32_t by_wide_folding(std::uint32_t state, const std::uint8_t* data,
                                            std::size_t nbytes) {
  __m512i lanes[4];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] = _mm512_loadu_si512(data + 64 * lane);
  lanes[0] = _mm512_xor_si512(
      lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  data += kWide;
  nbytes -= kWide;
  const __m512i stride = _mm512_broadcast_i32x4(RAY_PIPE_FOLD_BY(8 * 256));
  for (; nbytes >= kWide; data += kWide, nbytes -= kWide)
    for (int lane = 0; lane < 4; ++lane)
      lanes[lane] = fold(lanes[lane], stride, _mm512_loadu_si512(data + 64 * lane));
  const __m512i step = _mm512_broadcast_i32x4(RAY_PIPE_FOLD_BY(8 * 64));
  __m512i all = lanes[0];
  for (int lane = 1; lane < 4; ++lane) all = fold(all, step, lanes[lane]);
  for (; nbytes >= 64; data += 64, nbytes -= 64) all = fold(all, step, _mm512_loadu_si512(data));
  alignas(64) std::uint8_t rest[64];
  _mm512_store_si512(rest, all);
  return by_table(by_folding(0, rest, 64), data, nbytes);
}

bool can_fold_wide() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  return can;
}

constexpr std::size_t kWide = 0;
bool can_fold() { return false; }
bool can_fold_wide() { return false; }
std::uint32_t by_wide_folding(std::uint32_t state, const std::uint8_t*, std::size_t) {
  return state;
}
std::uint32_t by_folding(std::uint32_t state, const std::uint8_t*, std::size_t) { return state; }

#endif

std::uint32_t crc32(std::uintptr_t address, std::size_t nbytes, std::uint32_t start) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(address);
  if (can_fold_wide() && nbytes >= kWide) return ~by_wide_folding(~start, data, nbytes);
  const bool folds = can_fold() && nbytes >= kStride;
  return ~(folds ? by_folding(~start, data, nbytes) : by_table(~start, data, nbytes));
}

}  // namespace

void bind_crc32(nb::module_& m) {
  m.attr("CRC32_FOLDS") = can_fold();
  m.def("crc32", &crc32, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ray_pipe
