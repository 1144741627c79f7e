// The attention of attention.h as functions for Python.

#include "attention.h"

extern "C" {

// whether this CPU has products of such pairs in bf16, by trying one; those in fp32 are everywhere
int has_bf16() {
  const BFloat16 rows[STEP * STEP] = {}, pairs[STEP * STEP] = {};
  float sums[STEP * STEP];
  try {
    product(STEP, STEP, STEP, rows, STEP, pairs, STEP, sums, STEP, false);
    at::native::cpublas::brgemm_release();
    return 1;
  } catch (const c10::Error&) {
    return 0;
  }
}

int forward_fp32(const Problem* p, const float* q, const float* k, const float* v, float* out, float* sums) {
  return forward(*p, q, k, v, out, sums);
}

int forward_bf16(const Problem* p, const BFloat16* q, const BFloat16* k, const BFloat16* v, BFloat16* out, float* sums) {
  return forward(*p, q, k, v, out, sums);
}

int backward_fp32(const Problem* p, const float* outer, const float* q, const float* k, const float* v, const float* out,
                  const float* sums, float* dq, float* dk, float* dv) {
  return backward(*p, outer, q, k, v, out, sums, dq, dk, dv);
}

int backward_bf16(const Problem* p, const BFloat16* outer, const BFloat16* q, const BFloat16* k, const BFloat16* v,
                  const BFloat16* out, const float* sums, BFloat16* dq, BFloat16* dk, BFloat16* dv) {
  return backward(*p, outer, q, k, v, out, sums, dq, dk, dv);
}
}
