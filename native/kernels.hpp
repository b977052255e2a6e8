// Quantise, pack and add: what module.cpp binds and kernels.cpp implements.
//
// kernels.cpp is compiled once for each instruction set, so that one wheel runs everywhere and is
// fast where it can be. Every build gives the same bits; `compressors/kernels_torch.py` says which.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ray_pipe {

using std::size_t;

// Shape and grid of one call. Matrices are dense and row-major; a row has ceil(channels*bits/8)
// bytes of codes and ceil(channels/group) bf16 scales.
struct Layout {
  size_t rows;
  size_t channels;
  int bits;
  size_t group;
  bool symmetric;

  size_t code_bytes() const { return (channels * static_cast<size_t>(bits) + 7) / 8; }
  size_t num_groups() const { return (channels + group - 1) / group; }
};

// Sums of squares of h - row, h and h - new.
struct Sums {
  double delta = 0;
  double value = 0;
  double error = 0;
};

// Outputs too large for this many bytes of cache are written past it; what the last cache holds
// unless told otherwise. Defined in bind_kernels.cpp, once for all instruction sets.
extern size_t stream_beyond;

// Each returns how many rows (or parts) could not be coded: values (encoding) or scales (decoding) that are
// not finite. A caller that gets anything but 0 throws the outputs away.
// `row` and `new_row` are bf16 if row_is_bf16, else fp32.
struct Kernels {
  const char* isa;
  size_t (*quantize)(const Layout&, const float* x, uint8_t* codes, uint16_t* scales);
  size_t (*dequantize)(const Layout&, const uint8_t* codes, const uint16_t* scales, float* out);
  size_t (*delta_encode)(const Layout&, const float* h, const void* row, bool row_is_bf16,
                         uint8_t* codes, uint16_t* scales, void* new_row, Sums* sums);
  size_t (*delta_decode)(const Layout&, const uint8_t* codes, const uint16_t* scales,
                         const void* row, bool row_is_bf16, float* out, void* new_row);
  size_t (*touch)(const Layout&, const uint8_t* codes, const uint16_t* scales, const void* row,
                  bool streamed, float* out, void* new_row);
};

namespace isa_baseline {
const Kernels& kernels();
}
#ifdef RAY_PIPE_X86
namespace isa_avx2 {
const Kernels& kernels();
}
namespace isa_avx512 {
const Kernels& kernels();
}
#endif

}  // namespace ray_pipe
