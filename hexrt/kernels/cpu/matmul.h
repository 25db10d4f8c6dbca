/* Linear layers over packed weights; lanes.h says how they lie. */
#ifndef HEXRT_MATMUL_H
#define HEXRT_MATMUL_H

#include "team.h"

enum { KIND_INT4 = 4, KIND_INT8 = 8, KIND_BF16 = 16, KIND_FP32 = 32 };

#define PANEL 16 /* rows of a weight */
#define BLOCK 32 /* columns */
#define MOST_COLUMNS 65536

/* `stride`: bytes from one panel to the next. k is a multiple of 32 and at most MOST_COLUMNS. `bias` may be null. */
typedef struct {
    int64_t kind, n, k, stride;
    const unsigned char *packed;
    const float *bias;
} hx_linear;

/* Panels from .. to - 1 of y[m, n] = x[m, k] W^T + bias + residual[m, n], on this thread; y's and residual's rows are ldy apart. y may be
   residual. */
void hx_panels(const hx_linear *linear, long from, long to, const float *x, long m, const float *residual, float *y, long ldy);

#endif
