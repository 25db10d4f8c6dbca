/* Weights into the layout of lanes.h, rounded as quantised.py says: its plain torch gives the same bits. */
#include "matmul.h"
#include "vector.h"

#define PIECES (BLOCK / VW)

typedef struct {
    int64_t kind, n, k, stride;
    const float *weight;
    unsigned char *out;
} packing;

/* Rounds to the nearest, ties to even, what is well below 2^22. */
HX_INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }

/* Thirty-two numbers as whole ones: (x - minimum) / scale within least .. greatest. */
HX_INLINE void whole(const vf *x, float minimum, float scale, float least, float greatest, int8_t *out) {
    const vf divisor = hx_all(scale > 0 ? scale : 1.0f), low = hx_all(least), high = hx_all(greatest);
    for (int i = 0; i < PIECES; i++) {
        vf q = nearest((x[i] - minimum) / divisor);
        q = hx_select((vi)(q < low), low, hx_select((vi)(q > high), high, q));
        for (int j = 0; j < VW; j++) out[i * VW + j] = (int8_t)q[j];
    }
}

HX_INLINE uint16_t to_half(float x, float *back) {
    const vh half = hx_float_to_half(hx_all(x));
    *back = hx_half_to_float(half)[0];
    return half[0];
}

static void pack_block4(const vf *x, long row, unsigned char *out) {
    vf least = x[0], greatest = x[0];
    for (int i = 1; i < PIECES; i++) {
        least = hx_select((vi)(x[i] < least), x[i], least);
        greatest = hx_select((vi)(x[i] > greatest), x[i], greatest);
    }
    float low = least[0], high = greatest[0], scale, minimum;
    for (int i = 1; i < VW; i++) low = least[i] < low ? least[i] : low, high = greatest[i] > high ? greatest[i] : high;
    uint16_t *numbers = (uint16_t *)(out + 256);
    numbers[row] = to_half((high - low) / 15.0f, &scale);
    numbers[PANEL + row] = to_half(low, &minimum);
    int8_t q[BLOCK];
    whole(x, minimum, scale, 0, 15, q);
    for (int line = 0; line < 4; line++)
        for (int j = 0; j < 4; j++) out[(line * PANEL + row) * 4 + j] = (unsigned char)(q[line * 8 + j] | q[line * 8 + 4 + j] << 4);
}

static uint16_t pack_block8(const vf *x, long row, unsigned char *out) {
    float most = 0, scale;
    for (int i = 0; i < PIECES; i++)
        for (int j = 0; j < VW; j++) {
            const float size = x[i][j] < 0 ? -x[i][j] : x[i][j];
            most = size > most ? size : most;
        }
    const uint16_t half = to_half(most / 127.0f, &scale);
    int8_t q[BLOCK];
    whole(x, 0, scale, -127, 127, q);
    for (int line = 0; line < 8; line++)
        for (int j = 0; j < 4; j++) out[(line * PANEL + row) * 4 + j] = (unsigned char)q[line * 4 + j];
    return half;
}

static void pack_row(const packing *job, const float *from, long row, unsigned char *panel) {
    const long blocks = job->k / BLOCK;
    const vf zeros[PIECES] = {0};
    for (long block = 0; block < blocks; block++) {
        vf x[PIECES];
        for (int i = 0; i < PIECES; i++) x[i] = from ? hx_load(from + block * BLOCK + i * VW, HX_F32) : zeros[i];
        if (job->kind == KIND_INT4) {
            pack_block4(x, row, panel + block * 320);
        } else if (job->kind == KIND_INT8) {
            ((uint16_t *)(panel + blocks * 512))[block * PANEL + row] = pack_block8(x, row, panel + block * 512);
        } else if (job->kind == KIND_FP32) {
            for (int i = 0; i < BLOCK; i++) ((float *)panel)[(block * BLOCK + i) * PANEL + row] = x[i / VW][i % VW];
        } else {
            uint16_t halves[BLOCK];
            for (int i = 0; i < PIECES; i++) hx_store(halves + i * VW, x[i], HX_BF16);
            for (int i = 0; i < BLOCK; i++) ((uint16_t *)panel)[((block * BLOCK + i) / 2 * PANEL + row) * 2 + i % 2] = halves[i];
        }
    }
}

static void pack_part(void *given, int thread, int threads) {
    const packing *job = given;
    const long panels = (job->n + PANEL - 1) / PANEL;
    for (long at = panels * thread / threads; at < panels * (thread + 1) / threads; at++) {
        unsigned char *panel = job->out + at * job->stride;
        memset(panel, 0, job->stride);
        for (long row = 0; row < PANEL; row++)
            pack_row(job, at * PANEL + row < job->n ? job->weight + (at * PANEL + row) * job->k : 0, row, panel);
    }
}

/* Panels of weight[n, k], which are `stride` bytes each and follow each other at `out`. */
HX_API void hx_pack(int64_t kind, int64_t n, int64_t k, int64_t stride, const float *weight, unsigned char *out, int threads) {
    packing job = {kind, n, k, stride, weight, out};
    hx_team_run(threads, pack_part, &job);
}
