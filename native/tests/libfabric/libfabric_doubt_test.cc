// libfabric_doubt_test.cc: a tcp stream that breaks while somebody still listens at the other end: the peer may be dying, or live. Both rails
// are driven by hand, so what the other end has done when is chosen; a process that is being killed is a rail that nobody polls.
#include <sys/socket.h>

#include <algorithm>
#include <optional>

#include "libfabric_pair.h"

namespace asyncfabric::testing {
namespace {

// As the end of a process does, or a network: both ends of each connected stream of this process see its end. Listeners stay.
size_t break_streams() {
  size_t broken = 0;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_storage other{};
    socklen_t length = sizeof other;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) != 0 || other.ss_family != AF_INET) continue;
    broken += shutdown(fd, SHUT_RDWR) == 0 ? 1 : 0;
  }
  return broken;
}

class LibfabricDoubt : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr uint64_t kLength = 8 << 20;
  LibfabricDoubt()
      : writer(spec_of(GetParam()), kLength), target(std::make_unique<Side>(spec_of(GetParam()), kLength)) {}
  void SetUp() override {
    if (writer.rail->info().version.find("ofi_rxm") != std::string::npos)
      GTEST_SKIP() << "the libfabric here has no sockets without ofi_rxm";
    link.emplace(writer, *target);
    link->post(link->write_imm(0, 0, 64, 1, 1), {&writer, target.get()});
    EXPECT_TRUE(
        pump_until({&writer, target.get()}, [&] { return writer.done.size() == 1 && target->imms.size() == 1; }));
    writer.done.clear();
    for (uint64_t tag = 2; tag < 8; ++tag) link->post(link->write(0, 0, kLength, tag), {&writer});
    for (int i = 0; i < 200; ++i) writer.pump();  // the target takes nothing: all of them are under way
    EXPECT_TRUE(writer.done.empty());
    EXPECT_GE(break_streams(), 2u);
    for (int i = 0; i < 200; ++i) writer.pump();
    EXPECT_TRUE(writer.done.empty()) << "nobody knows yet whether the peer lives";
  }
  bool all_ended() const { return writer.done.size() == 6; }
  size_t failed(StatusCode code) const {
    return static_cast<size_t>(std::count_if(writer.done.begin(), writer.done.end(),
                                             [&](const auto& done) { return done.second.code == code; }));
  }

  Side writer;
  std::unique_ptr<Side> target;
  std::optional<Link> link;
};

TEST_P(LibfabricDoubt, NothingThatIsCountedIsPostedMeanwhile) {
  const WorkRequest counted = link->signal(9, 7);
  EXPECT_EQ(writer.rail->post({&counted, 1}).status.code, StatusCode::kBusy);
  link->post(counted, {&writer, target.get()});  // once the doubt has ended
  EXPECT_TRUE(pump_until({&writer, target.get()}, [&] { return target->imms.size() == 2 && writer.done.size() == 7; }));
}

TEST_P(LibfabricDoubt, WhoAnswersOnANewStreamLives) {
  ASSERT_TRUE(pump_until({&writer, target.get()}, [&] { return all_ended(); }));
  EXPECT_EQ(failed(StatusCode::kTransport), 6u);
  EXPECT_TRUE(writer.lost.empty());
}

TEST_P(LibfabricDoubt, WhoseListenerGoesAsWellIsDead) {
  target.reset();
  ASSERT_TRUE(pump_until({&writer}, [&] { return all_ended() && !writer.lost.empty(); }));
  EXPECT_EQ(failed(StatusCode::kPeerDead), 6u);
}

TEST_P(LibfabricDoubt, DisconnectingEndsIt) {
  EXPECT_TRUE(writer.rail->disconnect(*link->peer).ok());
  ASSERT_TRUE(pump_until({&writer}, [&] { return all_ended(); }));
  EXPECT_EQ(failed(StatusCode::kPeerDead), 6u);
}

INSTANTIATE_TEST_SUITE_P(Providers, LibfabricDoubt, ::testing::Values("tcp"),
                         [](const auto& info) { return name_of_profile(info.param); });

}  // namespace
}  // namespace asyncfabric::testing
