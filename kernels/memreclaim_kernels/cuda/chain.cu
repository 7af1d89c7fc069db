// Any number of rows in cuBLAS's order of sums: one ascending chain of k16 steps over all of K for each output.
//
// wgmma with the weight as the A operand from registers, decoded there, and the activations as the B operand in shared
// memory. A block is WG warpgroups of 64 weight rows each x BN tokens, and one producer warp that keeps STAGES stages
// of BK columns in flight. Nothing is split over K, so the chip is filled by many small blocks, and the blocks of a
// cluster share what they read through multicast: CW blocks with the same rows share codes, CA blocks with the same
// tokens share activations. Pairs that share codes are fastest (1024 rows: 24.1 us, alone or sharing activations 26 to
// 28); clusters of four need a second wave, since the H200's GPCs do not hold 32 of them at one block a multiprocessor
// (51 us).
//
// SPLITS > 1 restarts the chain at multiples of `split_columns` and adds the parts ascending in fp32, which is what
// cuBLAS does for one group at less than about 160 rows.
#include "hopper.cuh"
#include "wgmma.cuh" // generated for BN: wgmma(d, a0..a3, descriptor)

#ifndef DEPTH
#define DEPTH 4096
#endif
constexpr int ROWS = WG * 64, ROW_TILES = WG * 4, CONSUMERS = WG * 128;
// Registers move from the producer to the consumers only in whole warpgroups.
constexpr int THREADS = CONSUMERS + (REGISTERS > 0 ? 128 : 32);
constexpr int STEPS = DEPTH / BK, GROUPS = BK / 32, BOXES = BK / 64;
constexpr int SLICE_BYTES = GROUPS * TILE_BYTES; // one row tile's codes of one stage, contiguous in memory
constexpr int CODE_BYTES = ROW_TILES * SLICE_BYTES, BOX_BYTES = BN * 128, ACTIVATION_BYTES = BOXES * BOX_BYTES;
constexpr int CLUSTER = CW * CA, PEERS = CW + CA - 1;
constexpr int OUT_PITCH = ROWS * 2 + 16;
static_assert(ROW_TILES % CW == 0 && BN % (8 * CA) == 0 && STEPS % STAGES == 0 && GROUPS % 2 == 0, "");

struct Shared {
    u8 activations[STAGES][ACTIVATION_BYTES]; // first: boxes must stand at multiples of 1024 bytes
    u8 codes[STAGES][CODE_BYTES];
    u32 factor[WG * 2][DEPTH / 32];
    u64 full[STAGES], empty[STAGES];
};
static_assert(BN * OUT_PITCH <= sizeof(Shared::activations) + sizeof(Shared::codes),
              "results are staged over the stages");

struct Place {
    int group, row_tile, token, cw, ca;
};

DEVICE void load_codes(Shared &shared, const Place &at, const u8 *slice, int stage) {
    constexpr int MINE = ROW_TILES / CW;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const u8 *src = slice + i * (DEPTH / 32) * TILE_BYTES;
        u8 *dst = shared.codes[stage] + (at.cw * MINE + i) * SLICE_BYTES;
        if (CW > 1) copy_bulk_multicast(dst, src, SLICE_BYTES, &shared.full[stage], ((1 << CW) - 1) << (at.ca * CW));
        else copy_bulk(dst, src, SLICE_BYTES, &shared.full[stage]);
    }
}

DEVICE void load_activations(Shared &shared, const Place &at, const TensorMap *map, int group_coordinate, int step,
                             int stage) {
    constexpr int MINE = BN / CA;
    constexpr u16 SAME_TOKENS = CA == 4 ? (1 | 1 << CW | 1 << 2 * CW | 1 << 3 * CW) : CA == 2 ? (1 | 1 << CW) : 1;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        u8 *dst = shared.activations[stage] + box * BOX_BYTES + at.ca * MINE * 128;
        int column = step * BK + box * 64, token = at.token + at.ca * MINE;
        if (CA > 1)
            copy_box_multicast(dst, map, column, group_coordinate, token, &shared.full[stage], SAME_TOKENS << at.cw);
        else copy_box(dst, map, column, group_coordinate, token, &shared.full[stage]);
    }
}

DEVICE void produce(Shared &shared, const Place &at, const TensorMap *map, int group_coordinate, const u8 *codes,
                    int row_tiles) {
    // First of the row tiles that this block fetches for its cluster.
    long long tile = static_cast<long long>(at.group) * row_tiles + at.row_tile + at.cw * (ROW_TILES / CW);
    const u8 *slice = codes + tile * (DEPTH / 32) * TILE_BYTES;
    // Codes of all stages are on their way before the previous kernel has ended.
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) {
        barrier_expect(&shared.full[step], CODE_BYTES + ACTIVATION_BYTES);
        load_codes(shared, at, slice + step * SLICE_BYTES, step);
    }
    wait_for_previous_kernel();
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) load_activations(shared, at, map, group_coordinate, step, step);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int step = STAGES; step < STEPS; ++step) {
        barrier_wait(&shared.empty[stage], parity);
        barrier_expect(&shared.full[stage], CODE_BYTES + ACTIVATION_BYTES);
        load_codes(shared, at, slice + step * SLICE_BYTES, stage);
        load_activations(shared, at, map, group_coordinate, step, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    let_next_kernel_start(); // its codes would only queue in front of ours
}

template <bool WIDE> DEVICE void decode_group(u32 (&a)[8], const uint4 &words, u32 factor) {
    decode_word<WIDE>(words.x, factor, a[0], a[1]);
    decode_word<WIDE>(words.y, factor, a[2], a[3]);
    decode_word<WIDE>(words.z, factor, a[4], a[5]);
    decode_word<WIDE>(words.w, factor, a[6], a[7]);
}

// What a warp of the consumers needs: its codes in stage 0, its row of factors, and where it reports that a stage is
// read.
struct Consumer {
    const uint4 *words;
    const u32 *factors;
    u32 peer_empty;
    int lane;
};

// The chains of 64 rows x BN tokens. The ring is unrolled, so that operand descriptors and barriers are constants in
// uniform registers: the loop is bound by its instructions, one warp a scheduler.
template <bool WIDE> DEVICE void sum_chains(float (&d)[BN / 2], Shared &shared, const Consumer &me, int split_columns) {
    const u32 low = operand_low(smem_address(shared.activations));
    u32 a[2][8];
#if SPLITS > 1
    float total[BN / 2];
    int left = split_columns / BK;
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) total[i] = -0.f; // the neutral element
#endif
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) d[i] = 0.f;
    barrier_wait(&shared.full[0], 0);
    uint4 words = me.words[0];
    u32 factor = me.factors[0];
    const u32 *factors = me.factors;
#pragma unroll 1
    for (int round = 0; round < STEPS / STAGES; ++round) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int next = (stage + 1) % STAGES, before = (stage + STAGES - 1) % STAGES;
            const bool last = stage == STAGES - 1 && round == STEPS / STAGES - 1;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                u32(&f)[8] = a[j & 1];
                decode_group<WIDE>(f, words, factor);
                wgmma_fence();
                const u32 columns = low + (stage * ACTIVATION_BYTES + j / 2 * BOX_BYTES + j % 2 * 64) / 16;
                wgmma(d, f[0], f[1], f[2], f[3], operand(columns));
                wgmma(d, f[4], f[5], f[6], f[7], operand(columns + 2));
                wgmma_commit();
                // Codes of the next group come while this one is multiplied.
                ++factors;
                if (j == GROUPS - 1 && !last) barrier_wait(&shared.full[next], round + (stage == STAGES - 1) & 1);
                if (j < GROUPS - 1 || !last) {
                    words = me.words[j < GROUPS - 1 ? (stage * CODE_BYTES + (j + 1) * TILE_BYTES) / 16
                                                    : next * CODE_BYTES / 16];
                    factor = *factors;
                }
                // The group before this one has read its registers and its stage.
                wgmma_wait<1>();
                // Stages that nobody refills are not released: their block may have exited.
                if (j == 0 && (stage > 0 ? round < STEPS / STAGES - 1 : round > 0) && me.lane < PEERS)
                    barrier_arrive_remote(me.peer_empty + before * 8);
            }
#if SPLITS > 1
            if (--left == 0 || last) {
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) {
                    total[i] = __fadd_rn(total[i], d[i]);
                    d[i] = 0.f;
                }
                left = split_columns / BK;
            }
#endif
        }
    }
    wgmma_wait<0>();
#if SPLITS > 1
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) d[i] = total[i];
#endif
}

DEVICE bool any_consumer(bool value) {
    u32 any;
    asm volatile("{.reg .pred mine, any; setp.ne.u32 mine, %1, 0; barrier.cta.red.or.pred any, 1, %2, mine; selp.u32 "
                 "%0, 1, 0, any;}"
                 : "=r"(any)
                 : "r"(static_cast<u32>(value)), "n"(CONSUMERS)
                 : "memory");
    return any;
}
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Fragments hold neighbouring tokens, the result has neighbouring rows: transpose through shared memory, then 16 bytes
// a thread.
DEVICE void store(const float (&d)[BN / 2], Shared &shared, const Place &at, u16 *out, int tokens, int groups,
                  int rank) {
    u8 *staged = reinterpret_cast<u8 *>(&shared);
    int lane = lane_id(), warp = warp_id();
    sync_consumers();
    u32 address = smem_address(staged) + (lane & 7) * OUT_PITCH + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j)
        store_transposed(address + j * 8 * OUT_PITCH, round_pair(d[4 * j], d[4 * j + 1]),
                         round_pair(d[4 * j + 2], d[4 * j + 3]));
    sync_consumers();
    constexpr int CHUNKS = ROWS / 8;
    for (int i = threadIdx.x; i < BN * CHUNKS; i += CONSUMERS) {
        int token = i / CHUNKS, chunk = i % CHUNKS;
        if (at.token + token >= tokens) break;
        u16 *to =
            out + (static_cast<long long>(at.token + token) * groups + at.group) * rank + at.row_tile * 16 + chunk * 8;
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(staged + token * OUT_PITCH + chunk * 16);
    }
}

// Decode factors of the block's rows to shared memory; says whether they are those of wide decoding.
DEVICE bool load_factors(Shared &shared, const Place &at, const u8 *exponents, int rank) {
    constexpr int COUNT = WG * 2 * (DEPTH / 32), MINE = (COUNT + CONSUMERS - 1) / CONSUMERS;
    const u8 *first = exponents + (static_cast<long long>(at.group) * (rank / 32) + at.row_tile / 2) * (DEPTH / 32);
    u32 mine[MINE];
    bool wide = false;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int block = i * CONSUMERS + threadIdx.x;
        mine[i] = block < COUNT ? first[block] : 0u;
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) wide |= mine[i] > MAX_NARROW_EXPONENT;
    wide = any_consumer(wide);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        int block = i * CONSUMERS + threadIdx.x;
        if (block < COUNT) shared.factor[0][block] = wide ? wide_factor(mine[i]) : narrow_factor(mine[i]);
    }
    sync_consumers();
    return wide;
}

// Grid (R / ROWS * CW, ceil(T / BN / CW), G), THREADS threads, clusters of CW * CA in x. map: activations [T, G,
// DEPTH], boxes of 64 columns x 1 group x BN / CA tokens, 128-byte swizzle, zeros outside; group_stride 0 means one
// group for all.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    chain(const __grid_constant__ TensorMap map, int group_step, const u8 *codes, const u8 *exponents, u16 *out,
          int tokens, int rank, int split_columns) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    int rank_in_cluster = CLUSTER > 1 ? cluster_rank() : 0;
    Place at;
    at.cw = rank_in_cluster % CW, at.ca = rank_in_cluster / CW;
    at.group = blockIdx.z;
    at.row_tile = (blockIdx.x / CLUSTER * CA + at.ca) * ROW_TILES;
    at.token = (blockIdx.y * CW + at.cw) * BN;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], PEERS * WG * 4);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (CLUSTER > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
    if (warp_id() >= WG * 4) {
#if REGISTERS > 0
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
        if (threadIdx.x == CONSUMERS) produce(shared, at, &map, at.group * group_step, codes, rank / 16);
    } else {
#if REGISTERS > 0
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
        bool wide = load_factors(shared, at, exponents, rank);
        wait_for_previous_kernel();
        int lane, warp = warp_id();
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        int peer = lane < CW ? at.ca * CW + lane : (lane - CW + (lane - CW >= at.ca)) * CW + at.cw;
        Consumer me = {reinterpret_cast<const uint4 *>(shared.codes[0] + warp * SLICE_BYTES) + lane,
                       shared.factor[warp / 2], remote_address(shared.empty, peer % CLUSTER), lane};
        float d[BN / 2];
        if (wide) sum_chains<true>(d, shared, me, split_columns);
        else sum_chains<false>(d, shared, me, split_columns);
        store(d, shared, at, out, tokens, gridDim.z, rank);
    }
}
