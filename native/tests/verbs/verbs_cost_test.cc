// verbs_cost_test.cc: what requests cost, counted and not timed: work requests, doorbells, completions, allocations. This file replaces
// operator new to count what this thread allocates. Not inlined: gcc would see new beside free() and call it a mismatch.
#include <cstdlib>
#include <new>

#include "verbs_rig.h"

namespace {
thread_local uint64_t allocations = 0;
}

[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  void* memory = std::malloc(size != 0 ? size : 1);
  if (memory == nullptr) std::abort();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace asyncfabric::verbs_rig {
namespace {

struct Counted {
  uint64_t done = 0;
  uint64_t came = 0;
};

// Polls without the lists of Side, which allocate.
void pump(Side& side, Counted& counted) {
  std::array<RailEvent, 64> events;
  const size_t count = side.rail->poll(events);
  for (size_t i = 0; i < count; ++i) {
    if (events[i].kind == RailEventKind::kDone && events[i].status.ok()) ++counted.done;
    if (events[i].kind == RailEventKind::kImmediate) ++counted.came;
  }
}

void write_and_wait(Side& a, Side& b, std::span<const WorkRequest> requests, uint64_t imms, Counted& at_a,
                    Counted& at_b) {
  const uint64_t done = at_a.done + requests.size(), came = at_b.came + imms;
  const uint64_t deadline = now_ns() + kPatience;
  while (!requests.empty() || at_a.done < done || at_b.came < came) {
    requests = requests.subspan(a.rail->post(requests).accepted);
    pump(a, at_a);
    pump(b, at_b);
    ASSERT_LT(now_ns(), deadline);
  }
}

TEST(VerbsCost, ASingleWriteIsOneOfEach) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  Counted at_a, at_b;
  const std::array one = {link.write_imm(0, 0, 4096, 1, 1)};
  write_and_wait(a, b, one, 1, at_a, at_b);
  const verbs::Figures before = a.figures();
  write_and_wait(a, b, one, 1, at_a, at_b);
  EXPECT_EQ(a.figures().work_requests - before.work_requests, 1u);
  EXPECT_EQ(a.figures().doorbells - before.doorbells, 1u);
  EXPECT_EQ(a.figures().completions - before.completions, 1u);
}

// One request per page, a doorbell and a completion per chain of 32, one immediate.
TEST(VerbsCost, PagesCostOneImmediateAndFewDoorbells) {
  NEED_VERBS();
  constexpr uint64_t kPages = 200;
  for (const uint64_t chain : {1, 4, 16, 32}) {
    Side a(device_a(), {{"chain", std::to_string(chain)}}), b(device_b());
    Link link(a, b);
    Counted at_a, at_b;
    const std::array one = {link.signal(1, 1)};
    write_and_wait(a, b, one, 1, at_a, at_b);
    std::vector<WorkRequest> pages;
    for (uint64_t i = 0; i < kPages; ++i) pages.push_back(link.write(i * 4096, i * 4096, 4096, i));
    pages.back() = link.write_imm((kPages - 1) * 4096, (kPages - 1) * 4096, 4096, kPages - 1, 5);
    const verbs::Figures before = a.figures();
    write_and_wait(a, b, pages, 1, at_a, at_b);
    EXPECT_EQ(a.figures().work_requests - before.work_requests, kPages);
    EXPECT_EQ(a.figures().doorbells - before.doorbells, (kPages + chain - 1) / chain);
    EXPECT_EQ(a.figures().completions - before.completions, (kPages + chain - 1) / chain);
  }
}

// To 64 peers: each has a queue pair of its own, so each piece is one of each.
TEST(VerbsCost, AScatterTo64PeersIsOneOfEachForEach) {
  NEED_VERBS();
  constexpr uint64_t kPeers = 64;
  Side a(device_a()), b(device_b());
  std::vector<std::unique_ptr<Link>> links;
  for (uint64_t i = 0; i < kPeers; ++i) links.push_back(std::make_unique<Link>(a, b));
  Counted at_a, at_b;
  std::vector<WorkRequest> pieces;
  for (uint64_t i = 0; i < kPeers; ++i) pieces.push_back(links[i]->write_imm(i * 4096, i * 4096, 4096, i, 1));
  write_and_wait(a, b, pieces, kPeers, at_a, at_b);
  const verbs::Figures before = a.figures();
  const uint64_t allocated = allocations;
  write_and_wait(a, b, pieces, kPeers, at_a, at_b);
  EXPECT_EQ(allocations - allocated, 0u);
  EXPECT_EQ(a.figures().work_requests - before.work_requests, kPeers);
  EXPECT_EQ(a.figures().doorbells - before.doorbells, kPeers);
  EXPECT_EQ(a.figures().completions - before.completions, kPeers);
}

TEST(VerbsCost, AWarmRailDoesNotAllocate) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  Counted at_a, at_b;
  std::vector<WorkRequest> mixed;
  for (uint64_t i = 0; i < 1500; ++i)
    mixed.push_back(i % 3 == 0 ? link.signal(i, 1) : link.write_imm(0, i * 64, i % 2 == 0 ? 64 : 512, i, 1));
  for (int round = 0; round < 3; ++round) write_and_wait(a, b, mixed, mixed.size(), at_a, at_b);
  const uint64_t before = allocations;
  for (int round = 0; round < 3; ++round) write_and_wait(a, b, mixed, mixed.size(), at_a, at_b);
  EXPECT_EQ(allocations - before, 0u);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
