// words.cuh: what the MoE kernels share: the shape of an exchange, the words by which ranks wait for each other, and the bulk copies
// of Hopper's copy engine as functions. The two structs are written again in asyncfabric/moe/gpu/launch.py; a test compares sizes.
#pragma once
#include <cstdint>

namespace moe {

constexpr uint32_t kMaxRanks = 32;
constexpr uint32_t kMaxExperts = 1023;
constexpr uint32_t kOrdinalBits = 22;
constexpr uint32_t kNone = 0xffffffffu;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kSend = 1;
constexpr uint32_t kReceive = 2;

// A choice of a token: on the wire `place` is expert and ordinal among the source's pairs for it; at the expert's rank, its row.
struct Pair {
  uint32_t place;
  float weight;
};

// State of this rank in its own memory: steps begun by each half, how many blocks of the kernel now running have read that, and rows
// packed so far by the send half that runs now for each rank behind a proxy. An exchange by the nodes has two lanes, with a state each.
enum Half : uint32_t { kDispatchSend, kDispatchReceive, kCombineSend, kCombineReceive, kHalves };
struct State {
  uint32_t step[kHalves];
  uint32_t readers[kHalves];
  uint32_t packed[kMaxRanks];
};

// What waits are for; the host names it.
enum Wait : uint32_t { kRecord = 1, kToken, kBack, kHead, kWeights };

// What comes by way of a proxy: counted by the engine in the word at `flag`; `seen` were waited for before.
enum Kind : uint32_t { kThere, kRest, kReturn, kKinds };
struct Arrival {
  const uint64_t* flag;
  uint64_t seen;
};

// Between two ranks lies a block for each direction: [verdict][parcel of turn 0][parcel of turn 1]... The sender stores to `outbox` of
// the receiver, the receiver reads `inbox` of the sender. Where one GPU reaches the other, both are the same memory of the receiver's
// GPU. For ranks behind a proxy they are pinned memory of this host, and the proxy writes the one to the other.
struct Exchange {
  uint64_t outbox[kMaxRanks];  // for each rank, as mapped here; 0: not present
  uint64_t inbox[kMaxRanks];
  uint32_t* verdict_out
      [kMaxRanks];  // verdicts for and from the ranks of all lanes, by their numbers in the whole exchange; 0: none
  const uint32_t* verdict_in[kMaxRanks];
  State* state;
  uint32_t* broken;   // in GPU memory, of all lanes: a kernel has given up
  uint32_t* missing;  // host words: what was waited for from each rank when a kernel gave up
  uint64_t deadline_ns;
  uint64_t turn_bytes;  // of a parcel; offsets below are inside of it
  uint64_t head, record_words, counts, pairs, token_words, slots, head_word, back_words, back, late_weights;
  Arrival* arrivals;          // [kinds][ranks][in_flight]
  uint64_t* reported[2];      // watch words of the proxy: the step whose dispatch, combine has been packed
  uint64_t* verdict_sent[2];  // the same, of both lanes' proxies: verdicts are there; 0: no proxy
  const uint32_t*
      notes;  // host words of the proxy for each rank: [lost][settled there, by turns][settled back, by turns]
  uint32_t rank, ranks, present, proxied, experts, top_k, max_tokens, in_flight, alignment;
  uint32_t row_bytes, scales, slot_bytes, back_row_bytes, parts, stage_bytes, most_experts, routers, private_tokens;
  uint32_t first_rank, rank_stride;  // of the ranks of this lane in the whole exchange
  uint32_t slot_rows;  // of each expert, which begin at multiples of as many; 0: the rows of experts lie close together
};

// The head of a parcel.
struct Head {
  uint32_t tokens;
  uint32_t rows;  // packed: behind a proxy only
};

constexpr uint64_t kVerdictBytes = 256;

__device__ inline uint32_t lane_of() { return threadIdx.x & 31; }

struct Experts {
  uint32_t first, count;
};

__device__ inline Experts experts_of(const Exchange& ex, uint32_t rank) {
  const uint32_t each = ex.experts / ex.ranks, more = ex.experts % ex.ranks;
  return {rank * each + min(rank, more), each + (rank < more)};
}

// The tokens of a rank are routed in as many pieces as there are routers; each counts for itself.
__device__ inline uint32_t piece_tokens(const Exchange& ex) { return (ex.max_tokens + ex.routers - 1) / ex.routers; }

// The rank of an expert, kNone where there is none.
__device__ inline uint32_t rank_of(uint32_t experts, uint32_t ranks, int64_t expert) {
  if (expert < 0 || expert >= experts) return kNone;
  const uint32_t e = static_cast<uint32_t>(expert), each = experts / ranks, more = experts % ranks;
  return e < more * (each + 1) ? e / (each + 1) : more + (e - more * (each + 1)) / each;
}

// The same, kNone where it is not present.
__device__ inline uint32_t owner_of(const Exchange& ex, int64_t expert) {
  const uint32_t rank = rank_of(ex.experts, ex.ranks, expert);
  return rank != kNone && ex.present >> rank & 1 ? rank : kNone;
}

__device__ inline bool is_proxied(const Exchange& ex, uint32_t rank) { return ex.proxied >> rank & 1; }

__device__ inline uint64_t parcel_of(const Exchange& ex, uint32_t step) {
  return kVerdictBytes + ((step - 1) & (ex.in_flight - 1)) * ex.turn_bytes;  // a power of two
}

// A part of the parcel of `step` for a rank, to be filled.
template <typename T>
__device__ inline T* out(const Exchange& ex, uint32_t rank, uint32_t step, uint64_t offset) {
  return reinterpret_cast<T*>(ex.outbox[rank] + parcel_of(ex, step) + offset);
}

// A part of the parcel of `step` from a rank, to be read.
template <typename T>
__device__ inline const T* in(const Exchange& ex, uint32_t rank, uint32_t step, uint64_t offset) {
  return reinterpret_cast<const T*>(ex.inbox[rank] + parcel_of(ex, step) + offset);
}

__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// A word that is all there is to know.
__device__ inline uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
}

// The number of the step that this half of the exchange does now, counted from 1, the same in all blocks.
__device__ inline uint32_t step_now(const Exchange& ex, Half half) {
  return *static_cast<volatile uint32_t*>(&ex.state->step[half]) + 1;
}

// One thread of each block, after the block has read the step: the last of them moves it on, so that the next launch, or the next
// replay of a graph, finds the next one without the host.
__device__ inline void pass_step(const Exchange& ex, Half half, uint32_t step) {
  __threadfence();
  if (atomicAdd(&ex.state->readers[half], 1) != gridDim.x - 1) return;
  ex.state->readers[half] = 0;
  *static_cast<volatile uint32_t*>(&ex.state->step[half]) = step;
}

__device__ inline bool is_broken(const Exchange& ex) { return *static_cast<volatile uint32_t*>(ex.broken) != 0; }

// The bit of a rank of this lane in a verdict.
__device__ inline uint32_t verdict_bit(const Exchange& ex, uint32_t rank) {
  return 1u << (ex.first_rank + rank * ex.rank_stride);
}

// Reports to the host and to the ranks of all lanes who is missing; from then on no kernel of this epoch waits or writes any more.
__device__ inline void give_up(const Exchange& ex, uint32_t absent, Wait what) {
  const uint32_t lane = lane_of();
  if (lane < kMaxRanks && absent >> lane & 1) static_cast<volatile uint32_t*>(ex.missing)[lane] = what;
  __threadfence_system();
  if (lane < kMaxRanks && ex.verdict_out[lane] != nullptr) store_release(ex.verdict_out[lane], absent);
  __syncwarp();
  if (lane == 0) {
    for (uint32_t proxy = 0; proxy < 2; ++proxy)
      if (ex.verdict_sent[proxy] != nullptr) store_release(ex.verdict_sent[proxy], 1);
    *static_cast<volatile uint32_t*>(ex.broken) = 1;
  }
  __threadfence_system();
}

// How long a warp that waits leaves the verdicts of other ranks alone. Those of ranks behind a proxy lie in host memory: a look is a read over
// PCIe, and all warps of a kernel read the same line. Reads of one line may go one after the other, before whatever else takes that way.
constexpr uint64_t kVerdictNs = 10'000'000;

// Whole warp: returns once `ready()` of each lane that has something to wait for (`mine`) is true; false once the deadline has passed,
// another rank gave up, or the proxy lost a rank (`lost()`: asked with `ready()` once more, since what came before the loss counts).
template <typename Ready, typename Lost>
__device__ inline bool wait_until(const Exchange& ex, bool mine, uint32_t rank, Wait what, Ready ready, Lost lost) {
  bool done = !mine;
  uint64_t begin = 0, looked = 0;
  for (uint32_t round = 1;; ++round) {
    if (!done) done = ready();
    if (__all_sync(kAll, done)) return true;
    if (round % 64 != 0) continue;
    const uint64_t now = __shfl_sync(kAll, now_ns(), 0);
    if (begin == 0) {
      begin = now;
      looked = now - blockIdx.x % 64 * (kVerdictNs / 64);  // blocks look one after the other
    }
    if (is_broken(ex)) return false;
    const bool late = now - begin > ex.deadline_ns;
    uint32_t absent = 0;
    if (late || now - looked > kVerdictNs) {
      looked = now;
      // A rank that gave up reports whom it missed: it is not missing itself.
      const uint32_t* const word = ex.verdict_in[lane_of()];
      if (word != nullptr) absent = load_acquire(word);
    }
    if (!done && lost() && !(done = ready())) absent |= verdict_bit(ex, rank);
    absent = __reduce_or_sync(kAll, absent) & ~verdict_bit(ex, ex.rank);
    if (absent == 0 && late) absent = __reduce_or_sync(kAll, done ? 0 : verdict_bit(ex, rank));
    if (absent == 0) continue;
    give_up(ex, absent, what);
    return false;
  }
}

// Whole warp: waits until the word of each lane that has one shows `step`. Equality is right: nobody writes the next step's word to a
// turn that was not combined (MOE-1).
__device__ inline bool await(const Exchange& ex, bool mine, const uint32_t* word, uint32_t step, uint32_t rank,
                             Wait what) {
  return wait_until(ex, mine, rank, what, [&] { return load_acquire(word) == step; }, [] { return false; });
}

// As `wait_until`; adds the nanoseconds that each lane waited to the number of its rank in `waited`, unless that is null.
template <typename Ready>
__device__ inline bool await(const Exchange& ex, bool mine, uint32_t rank, Wait what, Ready ready, int64_t* waited) {
  if (waited == nullptr) return wait_until(ex, mine, rank, what, ready, [] { return false; });
  const uint64_t begin = now_ns();
  uint64_t end = begin;
  const auto timed = [&] {
    if (!ready()) return false;
    end = now_ns();
    return true;
  };
  const bool all = wait_until(ex, mine, rank, what, timed, [] { return false; });
  if (mine) atomicAdd(reinterpret_cast<unsigned long long*>(waited) + rank, end - begin);
  return all;
}

// ---- bulk copies: one thread starts them, 16-byte aligned, any multiple of 16 bytes

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ inline void open_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void bulk_load(void* stage, const void* source, uint32_t bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(stage)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ inline void wait_load(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
}
__device__ inline void bulk_store(void* target, const void* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(shared_address(stage)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void
wait_stage_read() {  // the stages of all but the last kLeft stores of this thread may be written again
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
__device__ inline void wait_stores() {  // all stores of this thread have landed
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Between copies and plain accesses of this thread, either way: to memory of GPUs, to the stage, and to both. The last waits for all that
// the thread has under way.
__device__ inline void fence_global_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ inline void fence_stage_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace moe
