/* y = x W^T (+ bias) (+ residual) of float32 activations and packed weights (lanes.h). W's numbers are those that were packed: they are
   unpacked in registers, sums are float32 (but see `whole_rows`). Few rows of x: each panel is read once from memory for all of them. Many: a panel's part is
   unpacked into the nearest cache, where tiles of x meet it. A row's result depends on how many rows there are by rounding only. */
#include "matmul.h"

#include <string.h>

#include "lanes.h"

#if LANES == 16
#define TILE 12
#else
#define TILE 6
#endif
#define DIRECT 6     /* up to so many rows are computed straight from the packed weights */
#define CHUNK 384    /* columns unpacked at a time: 24 KiB */
#define PART 4       /* blocks of a tile that are summed by themselves: rounding grows with the length of a sum */
#define STRIPE 128   /* rows of x that meet one unpacked part */
#define AHEAD 4096   /* bytes from what is read to what is fetched */

#define BYTES4 320
#define WORDS8 512

HX_INLINE long block_bytes(const int kind) {
    return kind == KIND_INT4 ? BYTES4 : kind == KIND_INT8 ? WORDS8 : kind == KIND_BF16 ? 1024 : 2048;
}

HX_INLINE int is_whole(const int kind) { return kind == KIND_INT4 || kind == KIND_INT8; }

typedef struct {
    vf scale[PARTS], minimum[PARTS];
} scales;

HX_INLINE scales scales_of(const int kind, const unsigned char *panel, long blocks, long block) {
    scales out;
    const uint16_t *at = kind == KIND_INT4 ? (const uint16_t *)(panel + block * BYTES4 + 256)
                                           : (const uint16_t *)(panel + blocks * WORDS8) + block * PANEL;
    for (int p = 0; p < PARTS; p++) {
        out.scale[p] = halves(at + p * LANES);
        if (kind == KIND_INT4) out.minimum[p] = halves(at + PANEL + p * LANES);
        else out.scale[p] *= 0x1p-24f; /* of high_byte */
    }
    return out;
}

/* Eight columns from column 8 * line of a block on, each as its whole numbers q (bf16: the weights), handed to USE(column, part, value). */
#define EACH_COLUMN(kind, panel, block, line, USE)                                                              \
    if (kind == KIND_INT4) {                                                                                     \
        const uint32_t *at_ = (const uint32_t *)(panel + (block) * BYTES4) + (line) * PANEL;                     \
        for (int half_ = 0; half_ < 2; half_++) {                                                                \
            vu word_[PARTS];                                                                                     \
            for (int p = 0; p < PARTS; p++) word_[p] = words(at_ + p * LANES) >> (4 * half_) & 0x0f0f0f0fu;      \
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                                \
                vf value[PARTS];                                                                                 \
                for (int p = 0; p < PARTS; p++) value[p] = __builtin_convertvector(low_byte(word_[p], j), vf);   \
                USE(half_ * 4 + j)                                                                               \
            }                                                                                                    \
        }                                                                                                        \
    } else if (kind == KIND_INT8) {                                                                              \
        const uint32_t *at_ = (const uint32_t *)(panel + (block) * WORDS8) + 2 * (line) * PANEL;                 \
        for (int half_ = 0; half_ < 2; half_++) {                                                                \
            vu word_[PARTS];                                                                                     \
            for (int p = 0; p < PARTS; p++) word_[p] = words(at_ + half_ * PANEL + p * LANES);                   \
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                                \
                vf value[PARTS];                                                                                 \
                for (int p = 0; p < PARTS; p++) value[p] = __builtin_convertvector(high_byte(word_[p], j), vf);  \
                USE(half_ * 4 + j)                                                                               \
            }                                                                                                    \
        }                                                                                                        \
    } else if (kind == KIND_FP32) {                                                                              \
        const float *at_ = (const float *)panel + ((block) * BLOCK + 8 * (line)) * PANEL;                        \
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {                                                    \
            vf value[PARTS];                                                                                     \
            for (int p = 0; p < PARTS; p++) value[p] = load(at_ + j * PANEL + p * LANES);                        \
            USE(j)                                                                                               \
        }                                                                                                        \
    } else {                                                                                                     \
        const uint32_t *at_ = (const uint32_t *)panel + ((block) * BLOCK / 2 + 4 * (line)) * PANEL;              \
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                                    \
            vf value[PARTS];                                                                                     \
            for (int p = 0; p < PARTS; p++) value[p] = (vf)(words(at_ + j * PANEL + p * LANES) << 16);           \
            USE(2 * j)                                                                                           \
            for (int p = 0; p < PARTS; p++) value[p] = (vf)(words(at_ + j * PANEL + p * LANES) & 0xffff0000u);   \
            USE(2 * j + 1)                                                                                       \
        }                                                                                                        \
    }

/* One row of x: sums of whole numbers first, scaled once a block. */
HX_INLINE void direct_one(const int kind, const unsigned char *panel, const float *x, const float *of_block, long blocks, float *out) {
    vf total[PARTS] = {0};
    for (long block = 0; block < blocks; block++) {
        vf sum[2][PARTS] = {0};
        const float *from = x + block * BLOCK;
        for (int i = 0; i < block_bytes(kind); i += 64) __builtin_prefetch(panel + block * block_bytes(kind) + AHEAD + i);
        for (int line = 0; line < 4; line++) {
#define USE(column) \
    for (int p = 0; p < PARTS; p++) sum[(column) & 1][p] += value[p] * splat(from[line * 8 + (column)]);
            EACH_COLUMN(kind, panel, block, line, USE)
#undef USE
        }
        if (!is_whole(kind)) {
            for (int p = 0; p < PARTS; p++) total[p] += sum[0][p] + sum[1][p];
            continue;
        }
        scales with = scales_of(kind, panel, blocks, block);
        for (int p = 0; p < PARTS; p++) {
            total[p] += with.scale[p] * (sum[0][p] + sum[1][p]);
            if (kind == KIND_INT4) total[p] += with.minimum[p] * splat(of_block[block]);
        }
    }
    for (int p = 0; p < PARTS; p++) store(out + p * LANES, total[p]);
}

/* Few rows of x: weights are unpacked once for all of them. */
HX_INLINE void direct_some(const int kind, const int rows, const unsigned char *panel, const float *x, long k, float *out) {
    vf sum[8][PARTS] = {0};
    const long blocks = k / BLOCK;
    for (long block = 0; block < blocks; block++) {
        const float *from = x + block * BLOCK;
        scales with;
        if (is_whole(kind)) with = scales_of(kind, panel, blocks, block);
        for (int i = 0; i < block_bytes(kind); i += 64) __builtin_prefetch(panel + block * block_bytes(kind) + AHEAD + i);
        for (int line = 0; line < 4; line++) {
#define USE(column)                                                                              \
    for (int p = 0; p < PARTS; p++) {                                                            \
        if (kind == KIND_INT4) value[p] = value[p] * with.scale[p] + with.minimum[p];            \
        if (kind == KIND_INT8) value[p] = value[p] * with.scale[p];                              \
    }                                                                                            \
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {                                     \
        vf factor = splat(from[r * k + line * 8 + (column)]);                                    \
        for (int p = 0; p < PARTS; p++) sum[r][p] += value[p] * factor;                          \
    }
            EACH_COLUMN(kind, panel, block, line, USE)
#undef USE
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(out + r * PANEL + p * LANES, sum[r][p]);
}

/* Blocks first .. first + count - 1 of a panel as floats, [column][16]. */
HX_INLINE void unpack(const int kind, const unsigned char *panel, long blocks, long first, long count, float *out) {
    for (long block = first; block < first + count; block++) {
        scales with;
        if (is_whole(kind)) with = scales_of(kind, panel, blocks, block);
        for (int line = 0; line < 4; line++, out += 8 * PANEL) {
#define USE(column)                                                                              \
    for (int p = 0; p < PARTS; p++) {                                                            \
        if (kind == KIND_INT4) value[p] = value[p] * with.scale[p] + with.minimum[p];            \
        if (kind == KIND_INT8) value[p] = value[p] * with.scale[p];                              \
        store(out + (column) * PANEL + p * LANES, value[p]);                                     \
    }
            EACH_COLUMN(kind, panel, block, line, USE)
#undef USE
        }
    }
}

/* rows x 16 more of a sum: out += x[rows, count] w[count, 16]. */
HX_INLINE void tile(const int rows, const float *w, const float *x, long ldx, long count, float *out, long ldo) {
    vf sum[TILE][PARTS];
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sum[r][p] = (vf){0};
    _Pragma("GCC unroll 4") for (long i = 0; i < count; i++) {
        vf value[PARTS];
        for (int p = 0; p < PARTS; p++) value[p] = load(w + i * PANEL + p * LANES);
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) {
            vf factor = splat(x[r * ldx + i]);
            for (int p = 0; p < PARTS; p++) sum[r][p] += value[p] * factor;
        }
    }
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(out + r * ldo + p * LANES, load(out + r * ldo + p * LANES) + sum[r][p]);
}

static void tiles(const float *w, const float *x, long ldx, long rows, long count, float *out, long ldo) {
    for (; rows >= TILE; rows -= TILE, x += TILE * ldx, out += TILE * ldo) tile(TILE, w, x, ldx, count, out, ldo);
    switch (rows) {
#define CASE(n) case n: tile(n, w, x, ldx, count, out, ldo); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE > 6
        CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#endif
#undef CASE
    }
}

/* The columns of y that a panel makes: bias and residual are added as they are written, and what is past n is left out. */
HX_INLINE void finish(const hx_linear *linear, const float *sums, long rows, long panel, const float *residual, float *y, long ldy) {
    const long first = panel * PANEL, count = linear->n - first < PANEL ? linear->n - first : PANEL;
    for (long r = 0; r < rows; r++) {
        float *to = y + r * ldy + first;
        const float *from = sums + r * PANEL;
        if (count == PANEL && !linear->bias && !residual) {
            for (int p = 0; p < PARTS; p++) store(to + p * LANES, load(from + p * LANES));
            continue;
        }
        for (long i = 0; i < count; i++) {
            float value = from[i];
            if (linear->bias) value += linear->bias[first + i];
            if (residual) value += residual[r * ldy + first + i];
            to[i] = value;
        }
    }
}

#if defined(__AVX2__)
/* Whole numbers for few rows of x: x's blocks as 16-bit numbers of a scale of their own, sums exact in 32 bits. It rounds x in its 16th bit,
   and takes half the instructions of float32. */
#define WHOLE_ROWS 3
#define WHOLE_COLUMNS 16384

typedef struct {
    int32_t pairs[WHOLE_ROWS][WHOLE_COLUMNS / 2]; /* two columns each, in the order of `pair_of` */
    float scale[WHOLE_ROWS][WHOLE_COLUMNS / BLOCK], sum[WHOLE_ROWS][WHOLE_COLUMNS / BLOCK];
} whole_rows;

/* The first column of pair i of eight columns; the other is two further. */
HX_INLINE int pair_of(const int i) { return (i & 1) * 4 + (i >> 1); }

static void to_whole(const float *x, long blocks, int32_t *pairs, float *scale, float *sum) {
    for (long block = 0; block < blocks; block++, x += BLOCK, pairs += BLOCK / 2) {
        float most = 0, all = 0, odd = 0;
        int16_t q[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            const float size = __builtin_fabsf(x[i]);
            most = size > most ? size : most;
            all += x[i], odd += x[i] * 0; /* not a number where one of them is none */
        }
        const float factor = most > 0 && odd == 0 ? 32767 / most : 0;
        for (int i = 0; i < BLOCK; i++) q[i] = (int16_t)(int)(x[i] * factor + (x[i] < 0 ? -0.5f : 0.5f));
        for (int i = 0; i < BLOCK / 2; i++) {
            const int first = i / 4 * 8 + pair_of(i % 4);
            pairs[i] = (int32_t)((uint16_t)q[first] | (uint32_t)(uint16_t)q[first + 2] << 16);
        }
        scale[block] = most / 32767 + odd, sum[block] = all;
    }
}

#if LANES == 16
#define MADD(a, b) (vi)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#else
#define MADD(a, b) (vi)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#endif

HX_INLINE void direct_whole(const int rows, const unsigned char *panel, const whole_rows *x, long blocks, float *out) {
    vf total[WHOLE_ROWS][PARTS] = {0};
    for (long block = 0; block < blocks; block++) {
        vi sum[WHOLE_ROWS][PARTS] = {0};
        const uint32_t *at = (const uint32_t *)(panel + block * BYTES4);
        for (int i = 0; i < BYTES4; i += 64) __builtin_prefetch((const char *)at + AHEAD + i);
        _Pragma("GCC unroll 4") for (int line = 0; line < 4; line++) {
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                for (int p = 0; p < PARTS; p++) {
                    const vi value = (vi)(words(at + line * PANEL + p * LANES) >> (4 * i) & 0x000f000fu);
                    for (int r = 0; r < rows; r++) sum[r][p] += MADD(value, (vi){0} + x->pairs[r][block * 16 + line * 4 + i]);
                }
            }
        }
        const scales with = scales_of(KIND_INT4, panel, blocks, block);
        for (int p = 0; p < PARTS; p++) {
            for (int r = 0; r < rows; r++) {
                const vf products = __builtin_convertvector(sum[r][p], vf);
                total[r][p] += with.scale[p] * splat(x->scale[r][block]) * products + with.minimum[p] * splat(x->sum[r][block]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(out + r * PANEL + p * LANES, total[r][p]);
}

static void whole(const hx_linear *linear, long from, long to, const float *x, long m, const float *residual, float *y, long ldy) {
    const long blocks = linear->k / BLOCK;
    whole_rows given;
    float sums[WHOLE_ROWS * PANEL] __attribute__((aligned(64)));
    for (long r = 0; r < m; r++) to_whole(x + r * linear->k, blocks, given.pairs[r], given.scale[r], given.sum[r]);
    for (long at = from; at < to; at++) {
        const unsigned char *panel = linear->packed + at * linear->stride;
        if (m == 1) direct_whole(1, panel, &given, blocks, sums);
        else if (m == 2) direct_whole(2, panel, &given, blocks, sums);
        else direct_whole(3, panel, &given, blocks, sums);
        finish(linear, sums, m, at, residual, y, ldy);
    }
}
#else
#define WHOLE_ROWS 0
#define WHOLE_COLUMNS 0
#define whole(...)
#endif

HX_INLINE void direct(const int kind, const hx_linear *linear, long from, long to, const float *x, const float *of_block, long m,
                      const float *residual, float *y, long ldy) {
    const long k = linear->k, blocks = k / BLOCK;
    float sums[DIRECT * PANEL] __attribute__((aligned(64)));
    for (long at = from; at < to; at++) {
        const unsigned char *panel = linear->packed + at * linear->stride;
        switch (m) {
        case 1: direct_one(kind, panel, x, of_block, blocks, sums); break;
        case 2: direct_some(kind, 2, panel, x, k, sums); break;
        case 3: direct_some(kind, 3, panel, x, k, sums); break;
        case 4: direct_some(kind, 4, panel, x, k, sums); break;
        case 5: direct_some(kind, 5, panel, x, k, sums); break;
        default: direct_some(kind, 6, panel, x, k, sums); break;
        }
        finish(linear, sums, m, at, residual, y, ldy);
    }
}

HX_INLINE void striped(const int kind, const hx_linear *linear, long from, long to, const float *x, long m, const float *residual,
                       float *y, long ldy) {
    const long k = linear->k, blocks = k / BLOCK;
    const long pieces = (k + CHUNK - 1) / CHUNK, step = (blocks + pieces - 1) / pieces;
    float w[CHUNK * PANEL] __attribute__((aligned(64)));
    float sums[STRIPE * PANEL] __attribute__((aligned(64)));
    for (long row = 0; row < m; row += STRIPE) {
        const long rows = m - row < STRIPE ? m - row : STRIPE;
        for (long at = from; at < to; at++) {
            const unsigned char *panel = linear->packed + at * linear->stride;
            memset(sums, 0, rows * PANEL * sizeof(float));
            for (long block = 0; block < blocks; block += step) {
                const long count = blocks - block < step ? blocks - block : step;
                const float *part = (const float *)panel + block * BLOCK * PANEL;
                if (kind != KIND_FP32) unpack(kind, panel, blocks, block, count, w);
                for (long first = 0; first < count; first += PART) {
                    const long columns = (count - first < PART ? count - first : PART) * BLOCK;
                    const float *from = (kind == KIND_FP32 ? part : w) + first * BLOCK * PANEL;
                    tiles(from, x + row * k + (block + first) * BLOCK, k, rows, columns, sums, PANEL);
                }
            }
            finish(linear, sums, rows, at, residual ? residual + row * ldy : 0, y + row * ldy, ldy);
        }
    }
}

/* Sums of x's blocks of 32, which the minima of int4 are multiplied with. */
static void sum_blocks(const float *x, long blocks, float *out) {
    for (long block = 0; block < blocks; block++, x += BLOCK) {
        vf part = load(x);
        for (int i = 1; i < BLOCK / LANES; i++) part += load(x + i * LANES);
        float all = 0;
        for (int i = 0; i < LANES; i++) all += part[i];
        out[block] = all;
    }
}

void hx_panels(const hx_linear *linear, long from, long to, const float *x, long m, const float *residual, float *y, long ldy) {
    float of_block[MOST_COLUMNS / BLOCK];
    if (m == 1 && linear->kind == KIND_INT4) sum_blocks(x, linear->k / BLOCK, of_block);
#define GO(kind)                                                                                   \
    case kind:                                                                                     \
        if (kind == KIND_INT4 && m <= WHOLE_ROWS && linear->k <= WHOLE_COLUMNS)                    \
            whole(linear, from, to, x, m, residual, y, ldy);                                 \
        else if (m <= (kind == KIND_FP32 ? 1 : DIRECT)) /* tiles need no unpacking of it, and round less */ \
            direct(kind, linear, from, to, x, of_block, m, residual, y, ldy);                      \
        else striped(kind, linear, from, to, x, m, residual, y, ldy);                              \
        break;
    switch (linear->kind) { GO(KIND_INT4) GO(KIND_INT8) GO(KIND_BF16) GO(KIND_FP32) }
#undef GO
}

typedef struct {
    const hx_linear *linear;
    const float *x, *residual;
    float *y;
    long m, ldy;
} product;

static void multiply(void *given, int thread, int threads) {
    const product *job = given;
    const long panels = (job->linear->n + PANEL - 1) / PANEL;
    hx_panels(job->linear, panels * thread / threads, panels * (thread + 1) / threads, job->x, job->m, job->residual, job->y, job->ldy);
}

/* y[m, n] = x[m, k] W^T + bias + residual[m, n]; x's rows are k apart, y's and residual's n. */
HX_API void hx_linear_run(const hx_linear *linear, const float *x, int64_t m, const float *residual, float *y, int threads) {
    product job = {linear, x, residual, y, m, linear->n};
    hx_team_run(threads, multiply, &job);
}
