/* y = x W^T (+ bias) (+ residual) of float32 activations and packed weights (lanes.h). W's numbers are those that were packed: they are
   unpacked in registers, sums are float32. Few rows of x: each panel is read once from memory for all of them. Many: a panel's part is
   unpacked into the nearest cache, where tiles of x meet it. A row's result depends on how many rows there are by rounding only. */
#include "matmul.h"

#include "lanes.h"

#if LANES == 16
#define TILE 12
#else
#define TILE 6
#endif
#define DIRECT 8     /* up to so many rows are computed straight from the packed weights */
#define CHUNK 384    /* columns unpacked at a time: 24 KiB */
#define STRIPE 128   /* rows of x that meet one unpacked part */

#define BYTES4 320
#define WORDS8 512

static long panel_bytes(int kind, long blocks) {
    if (kind == KIND_INT4) return blocks * BYTES4;
    if (kind == KIND_INT8) return blocks * WORDS8 + ((blocks * 2 * PANEL + 63) & ~63L);
    return blocks * BLOCK * PANEL * 2;
}

typedef struct {
    vf scale[PARTS], minimum[PARTS];
} scales;

INLINE scales scales_of(const int kind, const unsigned char *panel, long blocks, long block) {
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
INLINE void direct_one(const int kind, const unsigned char *panel, const float *x, long blocks, float *out) {
    vf total[PARTS] = {0};
    for (long block = 0; block < blocks; block++) {
        vf sum[2][PARTS] = {0};
        const float *from = x + block * BLOCK;
        __builtin_prefetch(panel + (block + 8) * (kind == KIND_INT4 ? BYTES4 : WORDS8));
        for (int line = 0; line < 4; line++) {
#define USE(column) \
    for (int p = 0; p < PARTS; p++) sum[(column) & 1][p] += value[p] * splat(from[line * 8 + (column)]);
            EACH_COLUMN(kind, panel, block, line, USE)
#undef USE
        }
        if (kind == KIND_BF16) {
            for (int p = 0; p < PARTS; p++) total[p] += sum[0][p] + sum[1][p];
            continue;
        }
        scales with = scales_of(kind, panel, blocks, block);
        float all = 0;
        if (kind == KIND_INT4) {
            vf part = load(from);
            for (int i = 1; i < BLOCK / LANES; i++) part += load(from + i * LANES);
            for (int i = 0; i < LANES; i++) all += part[i];
        }
        for (int p = 0; p < PARTS; p++) {
            total[p] += with.scale[p] * (sum[0][p] + sum[1][p]);
            if (kind == KIND_INT4) total[p] += with.minimum[p] * splat(all);
        }
    }
    for (int p = 0; p < PARTS; p++) store(out + p * LANES, total[p]);
}

/* Few rows of x: weights are unpacked once for all of them. */
INLINE void direct_some(const int kind, const int rows, const unsigned char *panel, const float *x, long k, float *out) {
    vf sum[8][PARTS] = {0};
    const long blocks = k / BLOCK;
    for (long block = 0; block < blocks; block++) {
        const float *from = x + block * BLOCK;
        scales with;
        if (kind != KIND_BF16) with = scales_of(kind, panel, blocks, block);
        __builtin_prefetch(panel + (block + 4) * (kind == KIND_INT4 ? BYTES4 : WORDS8));
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
INLINE void unpack(const int kind, const unsigned char *panel, long blocks, long first, long count, float *out) {
    for (long block = first; block < first + count; block++) {
        scales with;
        if (kind != KIND_BF16) with = scales_of(kind, panel, blocks, block);
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
INLINE void tile(const int rows, const float *w, const float *x, long ldx, long count, float *out, long ldo) {
    vf sum[TILE][PARTS];
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sum[r][p] = load(out + r * ldo + p * LANES);
    for (long i = 0; i < count; i++) {
        vf value[PARTS];
        for (int p = 0; p < PARTS; p++) value[p] = load(w + i * PANEL + p * LANES);
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) {
            vf factor = splat(x[r * ldx + i]);
            for (int p = 0; p < PARTS; p++) sum[r][p] += value[p] * factor;
        }
    }
    _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(out + r * ldo + p * LANES, sum[r][p]);
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
