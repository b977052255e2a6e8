// Optimizer steps inside the store, in torch's order of operations, without fused multiply-add.
//
// One row at a time: a row that is absent from a batch keeps its state (torch's SparseAdam does the
// same). Sums of squares are made chunk by chunk in double, from the first element to the last.
#include <algorithm>
#include <cmath>

#include "table.hpp"

namespace ray_pipe::rows {

StepNumbers Table::numbers(double lr, uint64_t step) const {
  StepNumbers n;
  double rate = lr;
  if (config.optimizer == Optimizer::adam) {
    const double t = static_cast<double>(step);
    rate = lr * std::sqrt(1 - std::pow(config.beta2, t)) / (1 - std::pow(config.beta1, t));
    n.one_minus_beta1 = static_cast<float>(1 - config.beta1);
    n.one_minus_beta2 = static_cast<float>(1 - config.beta2);
  }
  n.minus_lr = static_cast<float>(-rate);
  n.eps = static_cast<float>(config.eps);
  return n;
}

namespace {

void sgd(float* w, const float* old, const float* g, uint32_t n, const StepNumbers& s) {
  for (uint32_t i = 0; i < n; ++i) w[i] = old[i] + s.minus_lr * g[i];
}

void adagrad(float* w, const float* old, const float* g, uint32_t n, const StepNumbers& s) {
  float* sum = w + n;
  const float* old_sum = old + n;
  for (uint32_t i = 0; i < n; ++i) {
    sum[i] = old_sum[i] + g[i] * g[i];
    w[i] = old[i] + s.minus_lr * g[i] / (std::sqrt(sum[i]) + s.eps);
  }
}

void row_adagrad(float* w, const float* old, const float* g, uint32_t n, const StepNumbers& s,
                 float accumulator) {
  const float root = std::sqrt(accumulator) + s.eps;
  for (uint32_t i = 0; i < n; ++i) w[i] = old[i] + s.minus_lr * g[i] / root;
}

void adam(float* w, const float* old, const float* g, uint32_t n, const StepNumbers& s) {
  float *m = w + n, *v = w + 2 * n;
  const float *old_m = old + n, *old_v = old + 2 * n;
  for (uint32_t i = 0; i < n; ++i) {
    m[i] = (g[i] - old_m[i]) * s.one_minus_beta1 + old_m[i];
    v[i] = (g[i] * g[i] - old_v[i]) * s.one_minus_beta2 + old_v[i];
    w[i] = old[i] + s.minus_lr * (m[i] / (std::sqrt(v[i]) + s.eps));
  }
}

}  // namespace

void Table::optimize(Version* fresh, const Version* old, const float* gradient, float count,
                     const StepNumbers& step) const {
  const uint8_t alive = old->alive();
  fresh->set(0, alive);
  fresh->next = nullptr;
  fresh->key = old->key;
  fresh->accumulator = old->accumulator;
  fresh->recency.store(kNoRecency, std::memory_order_relaxed);

  double squares[8], sum = 0;
  if (utility_bytes_ || config.optimizer == Optimizer::row_adagrad) {
    for (uint32_t c = 0; c < config.chunks; ++c) {
      const float* g = gradient + size_t{c} * chunk_;
      squares[c] = 0;
      for (uint32_t i = 0; i < chunk_; ++i)
        squares[c] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
      if (alive >> c & 1) sum += squares[c];
    }
  }
  if (config.optimizer == Optimizer::row_adagrad)
    fresh->accumulator = old->accumulator + static_cast<float>(sum / config.dim);
  if (utility_bytes_) {
    const auto* stored = reinterpret_cast<const uint16_t*>(old->payload());
    auto* to = reinterpret_cast<uint16_t*>(fresh->payload());
    const float decay = decay_since(stored[0]), scale = static_cast<float>(config.utility_scale);
    std::memset(to, 0, utility_bytes_);
    to[0] = static_cast<uint16_t>(epoch.load(std::memory_order_relaxed));
    for (uint32_t c = 0; c < config.chunks; ++c) {
      const float gained = count * static_cast<float>(std::sqrt(squares[c])) * scale;
      to[1 + c] = half_of(float_of(stored[1 + c]) * decay + gained);
    }
  }
  uint32_t rank = 0;
  for (uint32_t c = 0; c < config.chunks; ++c) {
    if (!(alive >> c & 1)) continue;
    float* w = chunk_at(fresh, rank);
    const float *before = chunk_at(old, rank), *g = gradient + size_t{c} * chunk_;
    ++rank;
    switch (config.optimizer) {
      case Optimizer::none: break;
      case Optimizer::sgd: sgd(w, before, g, chunk_, step); break;
      case Optimizer::adagrad: adagrad(w, before, g, chunk_, step); break;
      case Optimizer::row_adagrad:
        row_adagrad(w, before, g, chunk_, step, fresh->accumulator);
        break;
      case Optimizer::adam: adam(w, before, g, chunk_, step); break;
    }
  }
}

}  // namespace ray_pipe::rows
