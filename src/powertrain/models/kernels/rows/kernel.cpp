// The elementwise stretches of a decoder's block on a CPU, forward and backward: each reads and writes a token's numbers once.
//
// What torch's compiler would make of them, for any number of tokens, compiled in seconds and called without checks. Arithmetic
// is fp32; what products read and give is bf16 or fp32. A thread takes whole rows, of which a row is one token's numbers.
//
// Legend: T tokens, d width, f MLP width, H heads, K kv heads, D head width.

#include <algorithm>
#include <cstdint>

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
    if (norm.bias) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = (read[i] - mean) * rate;
        put(unit[i], value);
        put(out[i], value * norm.weight[i] + norm.bias[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float value = (read[i] - mean) * rate;
        put(unit[i], value);
        put(out[i], value * norm.weight[i]);
      }
    }
  }
}

// out = dx + the gradient of the norm's input
template <typename N>
void normalise_back(int64_t rows, int64_t width, const N* dh, const N* n, const float* rates, const Norm& norm, const float* dx,
                    float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const N *given = dh + row * width, *unit = n + row * width;
    const float* above = dx + row * width;
    float along = 0, mean = 0;
#pragma omp simd reduction(+ : along, mean)
    for (int64_t i = 0; i < width; ++i) {
      const float dn = get(given[i]) * norm.weight[i];
      along += dn * get(unit[i]);
      mean += dn;
    }
    along /= float(width);
    mean = norm.is_rms ? 0.f : mean / float(width);
    float* to = out + row * width;
    const float rate = rates[row];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      to[i] = above[i] + rate * (get(given[i]) * norm.weight[i] - mean - get(unit[i]) * along);
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
};

// a head (D) turned to its position, or back where `sign` is -1; `to` may be `from`
template <typename N> inline void turn(const Heads& p, int64_t row, float sign, const N* from, N* to) {
  const int64_t half = p.rotary_width / 2;
  const float *cosines = p.cosines + row * p.rotary_width, *sines = p.sines + row * p.rotary_width;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float left = get(from[i]), right = get(from[i + half]), sine = sign * sines[i];
    put(to[i], left * cosines[i] - right * sine);
    put(to[i + half], right * cosines[i] + left * sine);
  }
  if (to != from) std::copy(from + p.rotary_width, from + p.width, to + p.rotary_width);
}

// queries and keys of y (T, H + 2 K, D) turned in their place
template <typename N> void turn_heads(const Heads& p, N* y) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < p.rows; ++row) {
    N* head = y + row * (p.heads + 2 * p.kv_heads) * p.width;
    for (int64_t i = 0; i < p.heads + p.kv_heads; ++i, head += p.width) turn(p, row, 1.f, head, head);
  }
}

// the gradient of y from those of queries (T, H, D), keys and values (T, K, D)
template <typename N> void join_heads_back(const Heads& p, const N* dq, const N* dk, const N* dv, N* dy) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < p.rows; ++row) {
    N* to = dy + row * (p.heads + 2 * p.kv_heads) * p.width;
    for (int64_t i = 0; i < p.heads; ++i, to += p.width) turn(p, row, -1.f, dq + (row * p.heads + i) * p.width, to);
    for (int64_t i = 0; i < p.kv_heads; ++i, to += p.width) turn(p, row, -1.f, dk + (row * p.kv_heads + i) * p.width, to);
    std::copy_n(dv + row * p.kv_heads * p.width, p.kv_heads * p.width, to);
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

template <typename Visit> void with_activation(int32_t activation, Visit visit) {
  if (activation == 0) visit(Gelu{});
  else if (activation == 1) visit(GeluTanh{});
  else visit(Silu{});
}

}  // namespace

// each for numbers of products in fp32 and in bf16; activations as in models/config.py
#define FOR(N, NAME)                                                                                                           \
  void normalise_##NAME(int64_t rows, int64_t width, const float* x, const N* added, const Norm* norm, float* joined, N* n,    \
                        N* h, float* rates) {                                                                                  \
    normalise(rows, width, x, added, *norm, joined, n, h, rates);                                                              \
  }                                                                                                                            \
  void normalise_back_##NAME(int64_t rows, int64_t width, const N* dh, const N* n, const float* rates, const Norm* norm,       \
                             const float* dx, float* out) {                                                                    \
    normalise_back(rows, width, dh, n, rates, *norm, dx, out);                                                        \
  }                                                                                                                            \
  void activate_##NAME(int64_t rows, int64_t width, int32_t activation, int32_t gated, const N* inner, N* out) {               \
    with_activation(activation, [&](auto kind) {                                                                      \
      if (gated) activate<decltype(kind), true>(rows, width, inner, out);                                                      \
      else activate<decltype(kind), false>(rows, width, inner, out);                                                           \
    });                                                                                                                        \
  }                                                                                                                            \
  void activate_back_##NAME(int64_t rows, int64_t width, int32_t activation, int32_t gated, const N* inner, const N* dout,     \
                            N* out, N* dinner) {                                                                               \
    with_activation(activation, [&](auto kind) {                                                                      \
      if (gated) activate_back<decltype(kind), true>(rows, width, inner, dout, out, dinner);                                   \
      else activate_back<decltype(kind), false>(rows, width, inner, dout, out, dinner);                                        \
    });                                                                                                                        \
  }                                                                                                                            \
  void turn_heads_##NAME(const Heads* p, N* y) { turn_heads(*p, y); }                                                          \
  void join_heads_back_##NAME(const Heads* p, const N* dq, const N* dk, const N* dv, N* dy) {                                  \
    join_heads_back(*p, dq, dk, dv, dy);                                                                                       \
  }                                                                                                                            \
  void add_##NAME(int64_t rows, int64_t width, float* x, const N* y) { add(rows, width, x, y); }

extern "C" {
FOR(float, fp32)
FOR(Half, bf16)
}
