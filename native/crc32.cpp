// CRC-32 (the polynomial of zlib, gzip and Ethernet) as fast as memory is read.
//
// A message is a polynomial over GF(2) and its CRC the remainder modulo P. Sixteen bytes are folded
// onto the sixteen that lie D bits behind them by two carry-less products with x^D mod P, which leaves
// the remainder as it is; four such lanes run at once. What is left in the end, sixteen bytes and
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

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#else

constexpr std::size_t kStride = 0;
bool can_fold() { return false; }
std::uint32_t by_folding(std::uint32_t state, const std::uint8_t*, std::size_t) { return state; }

#endif

std::uint32_t crc32(std::uintptr_t address, std::size_t nbytes, std::uint32_t start) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(address);
  const bool folds = can_fold() && nbytes >= kStride;
  return ~(folds ? by_folding(~start, data, nbytes) : by_table(~start, data, nbytes));
}

}  // namespace

void bind_crc32(nb::module_& m) {
  m.attr("CRC32_FOLDS") = can_fold();
  m.def("crc32", &crc32, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ray_pipe
