// choice.cc: which NICs serve which GPU. Three rules, in this order:
// 1. One pool. NICs of different kinds cannot reach each other, so only the kind with the most bandwidth serves GPUs;
//    hardware goes before software and RDMA before plain Ethernet. Links that are down, and virtual functions beside
//    their physical one, serve nobody.
// 2. No strangers. Where each GPU has a NIC at some distance, NICs farther than that from every GPU stay spare: those
//    are the storage and management NICs of the large machines.
// 3. Fair and closest. The GPUs' shares of the pool differ by one NIC at most (with fewer NICs than GPUs: the NICs'
//    shares of GPUs), and among all such choices the one with the smallest sum of distances is taken.
#include "topology/choice.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "topology/matching.h"
#include "topology/proximity.h"

namespace asyncfabric::topology {
namespace {

using Indices = std::vector<uint32_t>;

// One far pair outweighs 127 pairs on a NUMA node, and so on down; ties go to the neighbours in order. Below 2^48.
constexpr std::array<int64_t, 5> kDistanceCost = {0, 1, 1 << 7, 1 << 14, 1 << 21};
constexpr int64_t kBeyondShare = 1ll << 50;

int64_t cost_of(const Proximity& closeness, uint32_t out_of_order) {
  return (kDistanceCost[static_cast<size_t>(closeness.distance)] << 26) +
         (static_cast<int64_t>(std::min(closeness.node_distance, 255u)) << 17) +
         (static_cast<int64_t>(std::min(closeness.bridges, 31u)) << 12) + std::min(out_of_order, 4095u);
}

// Larger wins: hardware RDMA, software RDMA, plain Ethernet.
int rank_of(const Nic& nic) { return nic.kind == NicKind::kEthernet ? 0 : nic.software ? 1 : 2; }

Indices usable_nics(const std::vector<Nic>& nics) {
  Indices out;
  for (uint32_t i = 0; i < nics.size(); ++i)
    if (nics[i].up && !nics[i].virtual_function) out.push_back(i);
  return out;
}

Indices strongest_pool(const std::vector<Nic>& nics, const Indices& usable) {
  std::array<std::array<double, 5>, 3> bandwidth{};
  for (const uint32_t i : usable)
    bandwidth[static_cast<size_t>(rank_of(nics[i]))][static_cast<size_t>(nics[i].kind)] +=
        std::max(nics[i].gbits_per_s, 1.0);
  for (int rank = 2; rank >= 0; --rank) {
    const auto& kinds = bandwidth[static_cast<size_t>(rank)];
    const auto best = std::max_element(kinds.begin(), kinds.end());
    if (*best <= 0) continue;
    Indices pool;
    for (const uint32_t i : usable)
      if (rank_of(nics[i]) == rank && static_cast<size_t>(nics[i].kind) == static_cast<size_t>(best - kinds.begin()))
        pool.push_back(i);
    return pool;
  }
  return {};
}

void leave_strangers(const Topology& topology, Indices& pool) {
  Distance needed = Distance::kSame;  // the largest of the GPUs' distances to their nearest NIC
  for (const Gpu& gpu : topology.gpus) {
    Distance nearest = Distance::kFar;
    for (const uint32_t i : pool) nearest = std::min(nearest, distance_between(gpu.place, topology.nics[i].place));
    needed = std::max(needed, nearest);
  }
  std::erase_if(pool, [&](uint32_t i) {
    return std::all_of(topology.gpus.begin(), topology.gpus.end(),
                       [&](const Gpu& gpu) { return distance_between(gpu.place, topology.nics[i].place) > needed; });
  });
}

// Gives each of `many` things one of `few`, whose shares then differ by one at most. Returns the share of each of many.
// Each of few has floor(many / few) places, and one more that costs so much that only the remainder is put there.
Indices fair_shares(size_t many, size_t few, const auto& cost) {
  const size_t places = many / few + (many % few != 0 ? 1 : 0);
  std::vector<std::vector<int64_t>> costs(many, std::vector<int64_t>(few * places));
  for (size_t one = 0; one < many; ++one)
    for (size_t share = 0; share < few; ++share)
      for (size_t place = 0; place < places; ++place)
        costs[one][share * places + place] = cost(one, share) + (place >= many / few ? kBeyondShare : 0);
  Indices out = cheapest_columns(costs);
  for (uint32_t& column : out) column = static_cast<uint32_t>(column / places);
  return out;
}

// How far a pair is from standing at the same relative position of both lists.
uint32_t out_of_order(size_t one, size_t ones, size_t other, size_t others) {
  const auto here = static_cast<int64_t>(one * others);
  const auto there = static_cast<int64_t>(other * ones);
  return static_cast<uint32_t>(std::abs(here - there) / static_cast<int64_t>(std::max(ones, others)));
}

}  // namespace

void choose_nics(Topology& topology) {
  const Indices usable = usable_nics(topology.nics);
  Indices pool = strongest_pool(topology.nics, usable);
  const size_t gpus = topology.gpus.size();
  topology.groups.assign(std::max<size_t>(gpus, 1), Group{});
  if (gpus == 0) {
    topology.groups.front().nics = pool;
  } else if (!pool.empty()) {
    leave_strangers(topology, pool);
    const auto cost = [&](size_t gpu, size_t nic) {
      return cost_of(proximity(topology.nodes, topology.gpus[gpu].place, topology.nics[pool[nic]].place),
                     out_of_order(gpu, gpus, nic, pool.size()));
    };
    if (pool.size() >= gpus) {
      const Indices gpu_of = fair_shares(pool.size(), gpus, [&](size_t nic, size_t gpu) { return cost(gpu, nic); });
      for (size_t nic = 0; nic < pool.size(); ++nic) topology.groups[gpu_of[nic]].nics.push_back(pool[nic]);
    } else {
      const Indices nic_of = fair_shares(gpus, pool.size(), cost);
      for (size_t gpu = 0; gpu < gpus; ++gpu) topology.groups[gpu].nics.push_back(pool[nic_of[gpu]]);
    }
  }
  for (size_t gpu = 0; gpu < gpus; ++gpu) topology.groups[gpu].gpu = static_cast<int32_t>(gpu);
  for (const uint32_t i : usable)
    if (std::find(pool.begin(), pool.end(), i) == pool.end()) topology.spare_nics.push_back(i);
}

std::vector<uint32_t> nics_for_node(const Topology& topology, int32_t numa_node) {
  Indices out = usable_nics(topology.nics);
  const auto distance = [&](uint32_t nic) {
    return node_distance(topology.nodes, numa_node, topology.nics[nic].place.numa_node);
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](uint32_t one, uint32_t other) { return distance(one) < distance(other); });
  return out;
}

}  // namespace asyncfabric::topology
