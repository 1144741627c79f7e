// The elementwise stretches of a decoder's block on a CPU, forward and backward: each reads and writes a token's numbers once. And
// the loss of rows.
//
// What torch's compiler would make of them, for any number of tokens, compiled in seconds and called without checks. Arithmetic
// is fp32; what products read and give is bf16 or fp32. A thread takes whole rows, of which a row is one token's numbers.
//
// Legend: T tokens, d width, f MLP width, H heads, K kv heads, D head width.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

using Half = uint16_t;                       // bf16

inline float get(float x) { return x; }
inline float get(Half x) { return std::bit_cast<float>(uint32_t(x) << 16); }
inline void put(float& to, float x) { to = x; }
inline void put(Half& to, float x) { to = half_bits(x); }

struct Norm {
  const float *weight, *bias;                // (d); a bias of null: there is none
  float epsilon;
  int32_t is_rms;
};

// joined = x + added where `added` is given; n the norm's input less its mean, times its rate; h the norm's result
template <typename N>
void normalise(int64_t rows, int64_t width, const float* x, const N* added, const Norm& norm, float* joined, N* n, N* h,
               float* rates) {
  const float *weight = norm.weight, *bias = norm.bias;        // through the reference they would be gathered one by one
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* read = x + row * width;
    float sum = 0, squares = 0, mean = 0;
    if (added) {
      float* to = joined + row * width;
      const N* more = added + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = read[i] + get(more[i]);
      read = to;
    }
    if (!norm.is_rms) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += read[i];
      mean = sum / float(width);
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (read[i] - mean) * (read[i] - mean);
    const float rate = 1.f / std::sqrt(squares / float(width) + norm.epsilon);
    N *unit = n + row * width, *out = h + row * width;
    rates[row] = rate;
    if (bias) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = (read[i] - mean) * rate;
        put(unit[i], value);
        put(out[i], value * weight[i] + bias[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = (read[i] - mean) * rate;
        put(unit[i], value);
        put(out[i], value * weight[i]);
      }
    }
  }
}

// out = dx + the gradient of the norm's input
template <typename N>
void normalise_back(int64_t rows, int64_t width, const N* dh, const N* n, const float* rates, const Norm& norm, const float* dx,
                    float* out) {
  const float* weight = norm.weight;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const N *given = dh + row * width, *unit = n + row * width;
    const float* above = dx + row * width;
    float along = 0, mean = 0;
#pragma omp simd reduction(+ : along, mean)
    for (int64_t i = 0; i < width; ++i) {
      const float dn = get(given[i]) * weight[i];
      along += dn * get(unit[i]);
      mean += dn;
    }
    along /= float(width);
    mean = norm.is_rms ? 0.f : mean / float(width);
    float* to = out + row * width;
    const float rate = rates[row];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      to[i] = above[i] + rate * (get(given[i]) * weight[i] - mean - get(unit[i]) * along);
  }
}

// activations, each with its derivative
struct Silu {
  static void at(float x, float& value, float& slope) {
    const float share = sigmoid(x);
    value = x * share;
    slope = share * (1.f + x * (1.f - share));
  }
};
struct GeluTanh {
  static void at(float x, float& value, float& slope) {
    const float root = 0.797884561f, cubic = 0.044715f;
    const float share = sigmoid(2.f * root * (x + cubic * x * x * x));
    value = x * share;
    slope = share + 2.f * x * share * (1.f - share) * root * (1.f + 3.f * cubic * x * x);
  }
};
struct Gelu {                                // the normal distribution as in parts.py, Abramowitz and Stegun 1964, 7.1.26
  static void at(float x, float& value, float& slope) {
    const float bell = power_of_two(-0.5f * x * x * LOG2E), t = 1.f / (1.f + 0.3275911f * 0.707106781f * std::abs(x));
    const float series =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float above = 0.5f * series * bell, share = x < 0 ? above : 1.f - above;
    value = x * share;
    slope = share + x * bell * 0.398942280f;
  }
};

// out (T, f) of inner (T, f), or with gates (T, 2 f)
template <typename Activation, bool GATED, typename N>
void activate(int64_t rows, int64_t width, const N* inner, N* out) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const N *gate = inner + row * width * (GATED ? 2 : 1), *up = gate + width;
    N* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      float value, slope;
      Activation::at(get(gate[i]), value, slope);
      put(to[i], GATED ? value * get(up[i]) : value);
    }
  }
}

// the same again, and the gradient of inner from that of out
template <typename Activation, bool GATED, typename N>
void activate_back(int64_t rows, int64_t width, const N* inner, const N* dout, N* out, N* dinner) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * width * (GATED ? 2 : 1);
    const N *gate = inner + first, *up = gate + width, *given = dout + row * width;
    N *to = out + row * width, *dgate = dinner + first, *dup = dgate + width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      float value, slope;
      Activation::at(get(gate[i]), value, slope);
      const float scale = GATED ? get(up[i]) : 1.f, gradient = get(given[i]);
      put(to[i], value * scale);
      put(dgate[i], gradient * scale * slope);
      if (GATED) put(dup[i], gradient * value);
    }
  }
}

struct Heads {
  int64_t rows, heads, kv_heads, width, rotary_width;          // a rotary width of 0: nothing is turned
  const float *cosines, *sines;              // (T, rotary width)
  const float *q_norm, *k_norm;              // (D), of RMS norms; null: there are none
  float epsilon;
  int64_t all() const { return (heads + 2 * kv_heads) * width; }
};

// a head (D) turned to its position, or back where `sign` is -1; `to` may be `from`
template <typename From, typename To> inline void turn(const Heads& p, int64_t row, float sign, const From* from, To* to) {
  const int64_t half = p.rotary_width / 2;
  const float *cosines = p.cosines + row * p.rotary_width, *sines = p.sines + row * p.rotary_width;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float left = get(from[i]), right = get(from[i + half]), sine = sign * sines[i];
    put(to[i], left * cosines[i] - right * sine);
    put(to[i + half], right * cosines[i] + left * sine);
  }
  for (int64_t i = p.rotary_width; i < p.width; ++i) put(to[i], get(from[i]));
}

template <typename N> inline float rate_of(const N* x, int64_t width, float epsilon) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += get(x[i]) * get(x[i]);
  return 1.f / std::sqrt(squares / float(width) + epsilon);
}

// what attention reads, of y (T, H + 2 K, D): queries and keys normalised where they are, and turned. Without norms `out` may be y
template <typename N> void position_heads(const Heads& p, const N* y, N* out) {
#pragma omp parallel
  {
    std::vector<float> unit(p.width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < p.rows; ++row) {
      for (int64_t head = 0; head < p.heads + p.kv_heads; ++head) {
        const N* from = y + row * p.all() + head * p.width;
        N* to = out + row * p.all() + head * p.width;
        if (!p.q_norm) {
          turn(p, row, 1.f, from, to);
          continue;
        }
        const float *weight = head < p.heads ? p.q_norm : p.k_norm, rate = rate_of(from, p.width, p.epsilon);
        for (int64_t i = 0; i < p.width; ++i) unit[i] = get(from[i]) * rate * weight[i];
        turn(p, row, 1.f, unit.data(), to);
      }
      const int64_t values = row * p.all() + (p.heads + p.kv_heads) * p.width;
      if (out != y) std::copy_n(y + values, p.kv_heads * p.width, out + values);
    }
  }
}

// the gradient of y from those of queries (T, H, D), keys and values (T, K, D), which may be where they belong in dy; `raw` are y's
// queries and keys. Strides are numbers from a token to the next, that of values as of keys. `sums` (threads, 2, D) begin at zero
// and get each thread's part of the gradients of the norms
template <typename N>
void position_heads_back(const Heads& p, const N* dq, int64_t q_stride, const N* dk, const N* dv, int64_t k_stride, const N* raw,
                         int64_t stride, N* dy, double* sums, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> given(p.width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < p.rows; ++row) {
      N* to = dy + row * p.all();
      for (int64_t head = 0; head < p.heads + p.kv_heads; ++head, to += p.width) {
        const bool is_query = head < p.heads;
        const N* from = is_query ? dq + row * q_stride + head * p.width : dk + row * k_stride + (head - p.heads) * p.width;
        if (!p.q_norm) {
          turn(p, row, -1.f, from, to);
          continue;
        }
        turn(p, row, -1.f, from, given.data());
        const N* x = raw + row * stride + head * p.width;
        const float *weight = is_query ? p.q_norm : p.k_norm, rate = rate_of(x, p.width, p.epsilon);
        double* sum = sums + (2 * omp_get_thread_num() + !is_query) * p.width;
        float along = 0;
        for (int64_t i = 0; i < p.width; ++i) {
          const float unit = get(x[i]) * rate;
          sum[i] += given[i] * unit;
          along += given[i] * weight[i] * unit;
        }
        along /= float(p.width);
        for (int64_t i = 0; i < p.width; ++i) put(to[i], rate * (given[i] * weight[i] - get(x[i]) * rate * along));
      }
      if (const N* from = dv + row * k_stride; from != to) std::copy_n(from, p.kv_heads * p.width, to);
    }
  }
}

// x (T, d) += y
template <typename N> void add(int64_t rows, int64_t width, float* x, const N* y) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    float* to = x + row * width;
    const N* more = y + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] += get(more[i]);
  }
}

struct Terms {                               // of a loss, as losses.py has them
  float label_smoothing, z_loss;
};

// the loss of each row (R), or with terms three numbers of it (3, R), see losses.py: 0 where the target is negative. Unless `scale`
// is 0 the loss's gradient times it takes the place of the logits (R, V), whose rows begin `stride` apart
template <typename N>
void score(int64_t rows, int64_t vocabulary, int64_t stride, const int64_t* targets, const Terms* terms, float scale, N* logits,
           float* losses) {
  const float smoothing = terms ? terms->label_smoothing : 0.f, z_loss = terms ? terms->z_loss : 0.f;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const auto found = [&](float loss, float plain, float square) {
      losses[row] = loss;
      if (terms) losses[rows + row] = plain, losses[2 * rows + row] = square;
    };
    N* x = logits + row * stride;
    if (targets[row] < 0) {
      found(0.f, 0.f, 0.f);
      if (scale) std::fill_n(x, vocabulary, N(0));
      continue;
    }
    const float target = get(x[targets[row]]);
    float largest = target, sum = 0, total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < vocabulary; ++i) largest = std::max(largest, get(x[i]));
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < vocabulary; ++i) sum += power_of_two((get(x[i]) - largest) * LOG2E);
    if (smoothing)
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < vocabulary; ++i) total += get(x[i]) - largest;
    const float plain = std::log(sum) + (largest - target), normaliser = largest + std::log(sum), square = normaliser * normaliser;
    const float smooth = std::log(sum) - total / float(vocabulary);
    found((1 - smoothing) * plain + z_loss * square + smoothing * smooth, plain, square);
    if (!scale) continue;
    const float share = scale * (1 + 2 * z_loss * normaliser) / sum, less = scale * smoothing / float(vocabulary);
#pragma omp simd
    for (int64_t i = 0; i < vocabulary; ++i) put(x[i], power_of_two((get(x[i]) - largest) * LOG2E) * share - less);
    put(x[targets[row]], power_of_two((target - largest) * LOG2E) * share - less - scale * (1 - smoothing));
  }
}

template <typename Visit> void with_activation(int32_t activation, Visit visit) {
  if (activation == 0) visit(Gelu{});
  else if (activation == 1) visit(GeluTanh{});
  else visit(Silu{});
}

}  // namespace
