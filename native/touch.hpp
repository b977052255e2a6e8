// What no decoder can be faster than: its reads and its writes, and nothing between them. Part of
// kernels.cpp, for benchmarks/codec_kernels.py.
//
// Reads every line of codes, scales and bf16 rows and writes every byte of the outputs, in the order
// of decode.hpp and with stores as wide, through the caches or past them. Outputs are filled with
// 0x3f80, a bf16 one, in every half: not with zeros, which some processors write faster than values.
// Returns the bits that were set in what was read, so that the compiler keeps the loads.

template <int BITS, bool STREAMED, class Row>
size_t touch_blocks(size_t blocks, const uint8_t* codes, const uint16_t* scales, const Row* row,
                    float* out, Row* new_row) {
  constexpr int per_line = 64 / sizeof(uint16_t);
  const Ints ones = Ints{} + 0x3f803f80;
  const auto fill = [&](auto* to) RP_INLINE_LAMBDA {
    for (size_t at = 0; at < kBlock; at += sizeof ones / sizeof *to) put<STREAMED>(to + at, ones);
  };
  Ints seen{};
  Words bytes{};
  for (size_t b = 0; b < blocks; ++b) {
    if constexpr (BITS == 8) bytes |= load<Words>(codes + b * kBlock);
    else seen |= load<int32_t>(codes + b * 4 * BITS);
    if (b % per_line == 0) seen |= int32_t{scales[b]};
    if constexpr (kHasRow<Row>) {
      seen |= load<Ints>(row + b * kBlock);
      fill(new_row + b * kBlock);
    }
    fill(out + b * kBlock);
  }
  if constexpr (STREAMED) end_streams();
  uint32_t lanes[kWidth], all = 0;
  store(lanes, seen);
  for (const uint32_t lane : lanes) all |= lane;
  return all | bytes[0] | bytes[1] | bytes[2] | bytes[3];
}

template <int BITS, class Row>
size_t touch_streamed(bool streamed, size_t blocks, const uint8_t* codes, const uint16_t* scales,
                      const Row* row, float* out, Row* new_row) {
  if (streamed) return touch_blocks<BITS, true>(blocks, codes, scales, row, out, new_row);
  return touch_blocks<BITS, false>(blocks, codes, scales, row, out, new_row);
}
