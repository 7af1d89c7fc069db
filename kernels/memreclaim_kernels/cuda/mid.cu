// 1..512 rows or so in cuBLAS's order of sums: one ascending chain of k16 steps over all of K for each output.
//
// A block is ROWS rows of the weight x TOKENS <= 64 tokens. Eight warps take codes to registers, decode them to bf16
// and lay them down in a ring of shared memory; one warpgroup multiplies (wgmma, the tokens as M = 64, the weight rows
// as N); one warp fetches activations. Nothing is split over K, so blocks are as small as lets them fill the chip once:
// at 64 tokens and two groups 16 rows, and each code is read and decoded once on the chip. That chain of 256 wgmma
// takes 20.6 cycles a step (measured, H200), 2.7 us; a chain of mma.sync takes 25.
//
// Decoding in the warps that multiply (chain.cu) is bound by their instructions at small tiles: 12.0 us at 128 rows.
// Sharing activations in clusters through multicast cost 0.5 us at two blocks and 3 us at four, so every block fetches
// its own.
//
// SPLITS > 1 restarts the chain at multiples of `split_columns` and adds the parts ascending in fp32: what cuBLAS does
// for one group below about 160 rows.
#include "hopper.cuh"
#include "wgmma_shared.cuh" // generated for N = ROWS: wgmma_shared(d, descriptor of A, descriptor of B)

#ifndef DEPTH
#define DEPTH 4096
#endif
constexpr int MULTIPLIERS = 4, THREADS = (DECODERS + MULTIPLIERS + 1) * 32;
constexpr int STEPS = DEPTH / BK, ROUNDS = STEPS / STAGES, BOXES = BK / 64, ROW_TILES = ROWS / 16;
constexpr int COLUMN_TILES = DEPTH / 32, TILES = COLUMN_TILES / DECODERS;  // column tiles of a decoder
constexpr int HELD = HOLD / ROW_TILES;                                     // of which it holds this many
constexpr int TILES_PER_STEP = BK / 32, TURNS = DECODERS / TILES_PER_STEP; // decoders that fill a stage; stages at once
constexpr int ROW_BLOCKS = (ROW_TILES + 1) / 2;
constexpr int A_BOX = TOKENS * 128, B_BOX = ROWS * 128;
static_assert(STEPS % STAGES == 0 && STAGES >= 3,
              "the multipliers look one stage ahead before they release the one behind");
static_assert(TOKENS % 8 == 0 && TOKENS <= 64 && HELD >= 1 && TILES % HELD == 0 && TILES <= 32, "");
static_assert(TILES_PER_STEP <= DECODERS && DECODERS % TILES_PER_STEP == 0 && BK % 64 == 0, "");

struct Shared {
    // wgmma reads 64 rows from every box, also where fewer tokens stand: what follows is read then, and not used.
    u8 activations[STAGES][BOXES * A_BOX];
    u8 weights[STAGES][BOXES * B_BOX];
    u64 full[STAGES], empty[STAGES];
};
static_assert(STAGES * BOXES * B_BOX + A_BOX >= 8192, "64 rows of the last box stay inside shared memory");

// Decoded tile -> the B operand: 8 rows of 128 bytes (64 columns), 16-byte chunks swizzled by the row; rows 8..15 1024
// bytes on.
template <bool WIDE> DEVICE void decode_tile(u8 *box, int half, const uint4 &words, u32 factor) {
    int lane = lane_id(), row = lane & 7, matrix = lane >> 3;
    const u32 w[4] = {words.x, words.y, words.z, words.w};
    u32 upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) decode_word<WIDE>(w[i], factor, upper[i], lower[i]);
    // Word i is chunk 4 * half + i of its row; lanes 8i..8i+7 give the addresses of chunk i.
    u32 address = smem_address(box) + row * 128 + (((half * 4 + matrix) ^ row) * 16);
    store_matrices(address, upper[0], upper[1], upper[2], upper[3]);
    store_matrices(address + 1024, lower[0], lower[1], lower[2], lower[3]);
}

DEVICE void load_column(uint4 (&words)[ROW_TILES], const u8 *src) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
        words[r] = load_stream(src + static_cast<long long>(r) * COLUMN_TILES * TILE_BYTES);
}

// Column tiles i * 8 + warp. With stages of fewer than 8 tiles, warps take turns with stages. A fresh barrier lets
// those who fill pass: they wait for the parity before.
template <bool WIDE> DEVICE void decode_all(Shared &shared, uint4 (&words)[HELD][ROW_TILES], const u8 *src,
                                            const u32 (&exponents)[ROW_BLOCKS], int warp) {
    int tile = warp % TILES_PER_STEP, stage = warp / TILES_PER_STEP, parity = 1;
#pragma unroll 1
    for (int first = 0; first < TILES; first += HELD) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            int i = first + h;
            barrier_wait(&shared.empty[stage], parity);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                u32 factor = decode_factor<WIDE>(__shfl_sync(~0u, exponents[r / 2], i));
                decode_tile<WIDE>(shared.weights[stage] + tile / 2 * B_BOX + r * 2048, tile % 2, words[h][r], factor);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane_id() == 0) barrier_arrive(&shared.full[stage]);
            if (i + HELD < TILES) load_column(words[h], src + (i + HELD) * DECODERS * TILE_BYTES);
            stage += TURNS;
            if (stage >= STAGES) stage -= STAGES, parity ^= 1;
        }
    }
}

DEVICE void fetch_all(Shared &shared, const TensorMap *map, int group_coordinate, int token) {
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_wait(&shared.empty[stage], round + 1 & 1);
            barrier_expect(&shared.full[stage], BOXES * A_BOX);
#pragma unroll
            for (int box = 0; box < BOXES; ++box)
                copy_box(shared.activations[stage] + box * A_BOX, map, (round * STAGES + stage) * BK + box * 64,
                         group_coordinate, token, &shared.full[stage]);
        }
    }
}

// Chain over all of K; d: tokens warp * 16 + g (+ 8), weight rows 8j + 2t (+ 1). The ring is unrolled, so that operand
// descriptors are constants in uniform registers: moving them there took longer than the products.
DEVICE void multiply_all(float (&d)[ROWS / 2], Shared &shared, int split_steps) {
    const u32 a = operand_low(smem_address(shared.activations)), b = operand_low(smem_address(shared.weights));
    bool leader = lane_id() == 0;
#if SPLITS > 1
    float total[ROWS / 2];
    int left = split_steps;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) total[i] = -0.f; // the neutral element
#endif
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) d[i] = 0.f;
    barrier_wait(&shared.full[0], 0);
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int next = (stage + 1) % STAGES, before = (stage + STAGES - 1) % STAGES;
            const bool last = stage == STAGES - 1 && round == ROUNDS - 1;
            if (stage == TRIGGER_STEP % STAGES && round == TRIGGER_STEP / STAGES) let_next_kernel_start();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_fence();
#pragma unroll
                for (int k = half * (BK / 32); k < (half + 1) * (BK / 32); ++k)
                    wgmma_shared(d, operand(a + ((stage * BOXES + k / 4) * A_BOX + k % 4 * 32) / 16),
                                 operand(b + ((stage * BOXES + k / 4) * B_BOX + k % 4 * 32) / 16));
                wgmma_commit();
                // Half a stage early, so that the chain does not stop between stages.
                if (half == 0 && !last) barrier_wait(&shared.full[next], round + (stage == STAGES - 1) & 1);
            }
            wgmma_wait<1>(); // the stage before this one is read
            if (leader && (stage > 0 || round > 0)) barrier_arrive(&shared.empty[before]);
#if SPLITS > 1
            if (--left == 0 || last) {
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) {
                    total[i] = __fadd_rn(total[i], d[i]);
                    d[i] = 0.f;
                }
                left = split_steps;
            }
#endif
        }
    }
    wgmma_wait<0>();
#if SPLITS > 1
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) d[i] = total[i];
#endif
}

// Grid (R / ROWS, ceil(T / TOKENS), G), THREADS threads. map: activations [T, G, DEPTH], boxes of 64 columns x 1 group
// x TOKENS tokens, 128-byte swizzle, zeros outside.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mid(const __grid_constant__ TensorMap map, int group_step, const u8 *codes, const u8 *exponents, u16 *out,
        int tokens, int rank, int split_columns) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    int lane = lane_id(), warp = warp_id(), group = blockIdx.z, row_tile = blockIdx.x * ROW_TILES,
        first_token = blockIdx.y * TOKENS;
    uint4 words[HELD][ROW_TILES];
    u32 exponent[ROW_BLOCKS];
    bool wide = false;
    const u8 *src = codes +
                    ((static_cast<long long>(group) * (rank / 16) + row_tile) * COLUMN_TILES + warp) * TILE_BYTES +
                    lane * 16;
    if (warp < DECODERS) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) load_column(words[i], src + i * DECODERS * TILE_BYTES);
        const u8 *block =
            exponents + (static_cast<long long>(group) * (rank / 32) + row_tile / 2) * COLUMN_TILES + warp;
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
            exponent[r] = lane < TILES ? block[r * COLUMN_TILES + lane * DECODERS] : 0u;
            wide |= exponent[r] > MAX_NARROW_EXPONENT;
        }
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], TILES_PER_STEP + 1);
            barrier_init(&shared.empty[i], MULTIPLIERS);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warp < DECODERS) {
        if (__any_sync(~0u, wide)) decode_all<true>(shared, words, src, exponent, warp);
        else decode_all<false>(shared, words, src, exponent, warp);
    } else if (warp < DECODERS + MULTIPLIERS) {
        float d[ROWS / 2];
        wait_for_previous_kernel();
        multiply_all(d, shared, split_columns / BK);
        int token = first_token + (warp - DECODERS) * 16 + lane / 4;
        int end = min(tokens, first_token + TOKENS);
        u16 *to = out + (static_cast<long long>(token) * gridDim.z + group) * rank + row_tile * 16 + lane % 4 * 2;
        long long eight = 8ll * gridDim.z * rank;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (token + half * 8 >= end) break;
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j)
                *reinterpret_cast<u32 *>(to + half * eight + j * 8) =
                    round_pair(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
        }
    } else if (lane == 0) {
        wait_for_previous_kernel();
        fetch_all(shared, &map, group * group_step, first_token);
    }
}
