// Python faces of the kernels: addresses in, nothing but numbers out.
//
// compressors/kernels.py has checked every shape, dtype and device and keeps the tensors alive, so
// addresses cost less than any array protocol. Work is done without the GIL and in the default
// floating point environment, so that torch.set_flush_denormal in a caller changes no bit.
#include <algorithm>
#include <cfenv>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "kernels.hpp"

namespace nb = nanobind;

namespace ray_pipe {
namespace {

// The size of the last cache that a core sees, where Linux tells; else what servers commonly have.
// (sysconf gives the sum over all sockets' parts on some processors, ten times too much.)
size_t last_cache_bytes() {
  size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    size_t kibibytes = 0;
    char unit = 0;
    if (file >> kibibytes >> unit && unit == 'K') largest = std::max(largest, kibibytes << 10);
  }
  return largest > 0 ? largest : size_t{32} << 20;
}

}  // namespace

size_t stream_beyond = last_cache_bytes();

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

// What this machine can run, slowest first.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found = {&isa_baseline::kernels()};
#ifdef RAY_PIPE_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&isa_avx2::kernels());
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      found.push_back(&isa_avx512::kernels());
  }
#endif
  return found;
}

const Kernels* chosen = supported().back();

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported()) names.emplace_back(kernels->isa);
  return names;
}

void use_isa(const std::string& name) {
  for (const Kernels* kernels : supported())
    if (name == kernels->isa) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("this machine cannot run the kernels built for '" + name + "'");
}

std::map<std::string, std::string> build_info() {
  return {{"compiler", __VERSION__},
          {"isa", chosen->isa},
          {"version", RAY_PIPE_VERSION},
          {"source", RAY_PIPE_NATIVE_SOURCE},
          {"built", RAY_PIPE_BUILD_TYPE}};
}

size_t quantize(Address x, Address codes, Address scales, size_t rows, size_t channels, int bits,
                size_t group, bool symmetric) {
  const DefaultFloats floats;
  return chosen->quantize({rows, channels, bits, group, symmetric}, at<const float>(x),
                          at<uint8_t>(codes), at<uint16_t>(scales));
}

size_t dequantize(Address codes, Address scales, Address out, size_t rows, size_t channels,
                  int bits, size_t group, bool symmetric) {
  const DefaultFloats floats;
  return chosen->dequantize({rows, channels, bits, group, symmetric}, at<const uint8_t>(codes),
                            at<const uint16_t>(scales), at<float>(out));
}

std::tuple<size_t, double, double, double> delta_encode(Address h, Address row, Address codes,
                                                        Address scales, Address new_row,
                                                        size_t rows, size_t channels, int bits,
                                                        size_t group, bool symmetric,
                                                        bool row_is_bf16) {
  const DefaultFloats floats;
  Sums sums;
  const size_t bad = chosen->delta_encode({rows, channels, bits, group, symmetric},
                                          at<const float>(h), at<const void>(row), row_is_bf16,
                                          at<uint8_t>(codes), at<uint16_t>(scales),
                                          at<void>(new_row), &sums);
  return {bad, sums.delta, sums.value, sums.error};
}

size_t delta_decode(Address codes, Address scales, Address row, Address out, Address new_row,
                    size_t rows, size_t channels, int bits, size_t group, bool symmetric,
                    bool row_is_bf16) {
  const DefaultFloats floats;
  return chosen->delta_decode({rows, channels, bits, group, symmetric}, at<const uint8_t>(codes),
                              at<const uint16_t>(scales), at<const void>(row), row_is_bf16,
                              at<float>(out), at<void>(new_row));
}

size_t set_stream_beyond(size_t nbytes) { return std::exchange(stream_beyond, nbytes); }

size_t touch(Address codes, Address scales, Address row, Address out, Address new_row, size_t rows,
             size_t channels, int bits, bool streamed) {
  return chosen->touch({rows, channels, bits, 32, false}, at<const uint8_t>(codes),
                       at<const uint16_t>(scales), at<const void>(row), streamed, at<float>(out),
                       at<void>(new_row));
}

// Several samples in one call: sample i has positions[i] rows, and its codes and scales follow those
// of the sample before it. Returns three sums for each sample; none if one could not be coded.
std::vector<double> delta_encode_rows(const std::vector<Address>& h,
                                      const std::vector<Address>& rows, Address codes,
                                      Address scales, const std::vector<Address>& new_rows,
                                      const std::vector<size_t>& positions, size_t channels,
                                      int bits, size_t group, bool symmetric, bool row_is_bf16) {
  const DefaultFloats floats;
  std::vector<double> found;
  found.reserve(3 * h.size());
  auto* code = at<uint8_t>(codes);
  auto* scale = at<uint16_t>(scales);
  for (size_t i = 0; i < h.size(); ++i) {
    const Layout layout{positions[i], channels, bits, group, symmetric};
    Sums sums;
    if (chosen->delta_encode(layout, at<const float>(h[i]), at<const void>(rows[i]), row_is_bf16,
                             code, scale, at<void>(new_rows[i]), &sums))
      return {};
    found.insert(found.end(), {sums.delta, sums.value, sums.error});
    code += layout.rows * layout.code_bytes();
    scale += layout.rows * layout.num_groups();
  }
  return found;
}

size_t delta_decode_rows(Address codes, Address scales, const std::vector<Address>& rows,
                         const std::vector<Address>& outs, const std::vector<Address>& new_rows,
                         const std::vector<size_t>& positions, size_t channels, int bits,
                         size_t group, bool symmetric, bool row_is_bf16) {
  const DefaultFloats floats;
  size_t bad = 0;
  const auto* code = at<const uint8_t>(codes);
  const auto* scale = at<const uint16_t>(scales);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Layout layout{positions[i], channels, bits, group, symmetric};
    bad += chosen->delta_decode(layout, code, scale, at<const void>(rows[i]), row_is_bf16,
                                at<float>(outs[i]), at<void>(new_rows[i]));
    code += layout.rows * layout.code_bytes();
    scale += layout.rows * layout.num_groups();
  }
  return bad;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("build_info", &build_info);
  m.def("isas", &isas);
  m.def("use_isa", &use_isa);
  m.def("stream_beyond", &set_stream_beyond);
  m.def("touch", &touch, Release());
  m.def("quantize", &quantize, Release());
  m.def("dequantize", &dequantize, Release());
  m.def("delta_encode", &delta_encode, Release());
  m.def("delta_decode", &delta_decode, Release());
  m.def("delta_encode_rows", &delta_encode_rows, Release());
  m.def("delta_decode_rows", &delta_decode_rows, Release());
}

}  // namespace ray_pipe
