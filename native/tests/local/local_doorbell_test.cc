// local_doorbell_test.cc: peers that abuse what wakes a rail: they fill their doorbell, end it, hand over something else, and write whatever
// they can reach. Others still wake it, and it still sleeps.
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "impostor.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

void fill(const UniqueFd& end) {
  const char byte = 0;
  while (send(end.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1) {}
}

void expect_wake_up(Endpoint& endpoint, Endpoint& guest, RailPeer& peer, uint32_t imm) {
  ASSERT_TRUE(endpoint.rail->prepare_wait());
  ASSERT_FALSE(readable(endpoint)) << "it would spin instead of sleeping";
  guest.post({signal(peer, imm, 100 + imm)});
  EXPECT_TRUE(readable(endpoint)) << "somebody else's news did not ring";
  endpoint.rail->cancel_wait();
  EXPECT_TRUE(eventually({&endpoint}, [&] { return !endpoint.imms.empty() && endpoint.imms.back() == imm; }));
}

TEST(LocalHostile, WhoFillsOrEndsItsDoorbellStopsNobody) {
  Endpoint endpoint;
  Endpoint guest;
  auto peer = guest.connect(endpoint);
  Impostor impostor(endpoint);
  expect_wake_up(endpoint, guest, *peer, 1);
  // Both directions are full, the second by the end that the rail has too; that blocks whoever does not ask for the contrary.
  fill(impostor.bell);
  fill(impostor.their_end);
  ASSERT_TRUE(readable(endpoint));
  endpoint.rail->cancel_wait();
  auto* header = impostor.segment->as<local::SegmentHeader>();
  for (uint64_t round = 1; round <= 50; ++round) {  // it wants to be rung, for sleeps that it invents
    header->producer_waiting.store(1);
    impostor.own_board->as<local::Board>()->sleep.store(round);
    impostor.publish(impostor.message("x"));
    endpoint.poll();
  }
  EXPECT_EQ(endpoint.messages.size(), 50u);
  expect_wake_up(endpoint, guest, *peer, 2);
  char stolen[4096];
  while (recv(impostor.their_end.get(), stolen, sizeof stolen, MSG_DONTWAIT) > 0) {}
  expect_wake_up(endpoint, guest, *peer, 3);
  const char urgent = 0;
  send(impostor.bell.get(), &urgent, 1, MSG_OOB | MSG_DONTWAIT);
  endpoint.rail->cancel_wait();
  expect_wake_up(endpoint, guest, *peer, 4);
  shutdown(impostor.their_end.get(), SHUT_RDWR);
  endpoint.rail->cancel_wait();
  expect_wake_up(endpoint, guest, *peer, 5);
}

TEST(LocalHostile, NobodyTakesTheNewsOfOthersAway) {
  Endpoint endpoint;
  Endpoint guest;
  auto peer = guest.connect(endpoint);
  Impostor impostor(endpoint);
  ASSERT_TRUE(endpoint.rail->prepare_wait());
  std::mt19937_64 random(23);
  for (int round = 0; round < 200; ++round) {  // all that it can write
    for (size_t at = 0; at < local::kPageBytes; at += 8) {
      const uint64_t word = round % 2 == 0 ? 0 : random();
      std::memcpy(impostor.segment->data() + at, &word, 8);
    }
    impostor.own_board->as<local::Board>()->sleep.store(random());
  }
  guest.post({signal(*peer, 7, 1)});
  EXPECT_TRUE(readable(endpoint));
  endpoint.rail->cancel_wait();
  EXPECT_TRUE(eventually({&endpoint}, [&] { return endpoint.imms == std::vector<uint32_t>{7}; }));
}

TEST(LocalHostile, OnlyAPairOfThePeerIsADoorbell) {
  Endpoint endpoint;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd datagrams(ends[0]);
  const UniqueFd others(ends[1]);
  const UniqueFd counting(eventfd(0, EFD_CLOEXEC));
  const UniqueFd elsewhere = knock(endpoint);  // leads to somebody else's socket
  const UniqueFd network(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  for (const UniqueFd* end : {&datagrams, &counting, &elsewhere, &network}) {
    EXPECT_EQ(Impostor(endpoint, *end).welcome.status, static_cast<uint32_t>(StatusCode::kPeerRejected));
  }
}

}  // namespace
}  // namespace asyncfabric
