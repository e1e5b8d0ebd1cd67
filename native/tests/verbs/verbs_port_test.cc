// verbs_port_test.cc: a port as its rail sees it: which GID is chosen out of a tree like the kernel's, how fast the port is, and what becomes
// of a rail whose port or address changes, over a library that this test replaces (replaced_port.h). Not run on a real mlx5.
#include "replaced_port.h"

namespace asyncfabric::verbs_rig {
namespace {

TEST(VerbsPort, PrefersRoceV2OverIpv4) {
  SysTree tree;
  tree.gid(0, kLinkLocal, "IB/RoCE v1");
  tree.gid(1, kLinkLocal, "RoCE v2");
  tree.gid(2, kIpv4, "IB/RoCE v1");
  tree.gid(4, kGlobal, "RoCE v2");
  EXPECT_EQ(tree.chosen(), 4) << tree.detail;
  tree.gid(6, kIpv4, "RoCE v2");
  EXPECT_EQ(tree.chosen(), 6);
  EXPECT_EQ(tree.text, "6 (RoCE v2, 10.0.1.2)");
  EXPECT_EQ(tree.chosen("", false), 0) << "InfiniBand takes the first";
}

TEST(VerbsPort, PrefersInterfacesThatAreUpAndNoVlan) {
  SysTree tree;
  tree.netdev("eth1", "up");
  tree.netdev("eth1.7", "up", "vlan");
  tree.netdev("bond0", "down", "bond");
  tree.gid(0, kIpv4, "RoCE v2", "eth1.7");
  EXPECT_EQ(tree.chosen(), 0) << "a VLAN is better than nothing";
  EXPECT_EQ(tree.text, "0 (RoCE v2, 10.0.1.2 on eth1.7, a VLAN)");
  tree.gid(1, kLinkLocal, "RoCE v2", "eth1");
  EXPECT_EQ(tree.chosen(), 0) << "and than an address that is not routed";
  tree.gid(2, kIpv4, "RoCE v2", "bond0");
  EXPECT_EQ(tree.chosen(), 0) << "its interface is down";
  tree.gid(3, kOtherIpv4, "RoCE v2", "eth1");
  EXPECT_EQ(tree.chosen(), 3);
  EXPECT_EQ(tree.text, "3 (RoCE v2, 10.0.2.3 on eth1)");
  tree.netdev("eth1", "down");
  EXPECT_EQ(tree.chosen(), 0);
}

TEST(VerbsPort, TakesTheOneThatIsNamed) {
  SysTree tree;
  tree.netdev("eth1", "up");
  tree.netdev("eth1.7", "up", "vlan");
  tree.gid(2, kIpv4, "IB/RoCE v1", "eth1");
  tree.gid(3, kIpv4, "RoCE v2", "eth1");
  tree.gid(5, kOtherIpv4, "RoCE v2", "eth1.7");
  tree.gid(6, kGlobal, "RoCE v2", "eth1.7");
  EXPECT_EQ(tree.chosen("2"), 2);
  EXPECT_EQ(tree.chosen("10.0.2.3"), 5);
  EXPECT_EQ(tree.chosen("2001:db8::1"), 6);
  EXPECT_EQ(tree.chosen("eth1.7"), 5) << "the best of that interface";
  EXPECT_EQ(tree.chosen("10.0.1.2"), 3) << "RoCE v2, where both have the address";
  for (const auto& [wish, named] :
       {std::pair{"4", "index 4"}, {"10.9.9.9", "10.9.9.9"}, {"eth9", "interface eth9"}, {"fe80::7", "fe80::7"}}) {
    EXPECT_EQ(tree.chosen(wish), -1);
    EXPECT_NE(tree.detail.find(named), std::string::npos) << tree.detail;
  }
  verbs::GidWish wish;
  for (const char* wrong : {"", "-1", "65536", "fe80:::1", "a b"})
    EXPECT_FALSE(verbs::parse_gid_wish(wrong, &wish)) << wrong;
}

TEST(VerbsPort, NoneIsAnErrorThatNamesThePort) {
  SysTree tree;
  EXPECT_EQ(tree.chosen(), -1);
  EXPECT_NE(tree.detail.find("IP address"), std::string::npos) << tree.detail;
}

// ---- a rail over the replaced library

TEST_F(ReplacedPort, NamesItsGid) {
  open();
  EXPECT_TRUE(states("GID 3 (RoCE v2, 10.0.1.2 on eth1)")) << rail->info().version;
}

// 256, the speed of a lane of XDR, is 0 in 8 bits.
TEST_F(ReplacedPort, XdrIsAsFastAsTheKernelReports) {
  library->active_speed = 0;
  tree.write(tree.port / "rate", "800 Gb/sec (4X XDR)");
  open();
  EXPECT_EQ(rail->info().gbits_per_s, 800);
}

TEST_F(ReplacedPort, WithoutARateTheLibrarysSpeedCounts) {
  open();
  EXPECT_EQ(rail->info().gbits_per_s, 400) << "4 lanes of NDR";
}

TEST_F(ReplacedPort, WithoutItsAddressTheRailIsDownByNameUntilItIsBack) {
  open();
  tree.no_gid(3);
  tree.gid(4, kOtherIpv4, "RoCE v2", "eth1");  // a new lease
  library->happens(IBV_EVENT_GID_CHANGE, 1);
  RailEvent event = next();
  EXPECT_EQ(event.kind, RailEventKind::kRailDown);
  EXPECT_EQ(event.status.code, StatusCode::kRailDown);
  EXPECT_EQ(event.status.raw, IBV_EVENT_GID_CHANGE);
  EXPECT_TRUE(states("has lost the address")) << rail->info().version;
  tree.gid(5, kIpv4, "RoCE v2", "eth1");
  library->happens(IBV_EVENT_GID_CHANGE, 1);
  event = next();
  EXPECT_EQ(event.kind, RailEventKind::kRailUp);
  EXPECT_FALSE(states("down")) << rail->info().version;
  rail.reset();
  EXPECT_EQ(library->unacknowledged.load(), 0u);
}

TEST_F(ReplacedPort, AnAddressThatIsBackWithoutAnEventIsFound) {
  open();
  tree.no_gid(3);
  library->happens(IBV_EVENT_GID_CHANGE, 1);
  EXPECT_EQ(next().kind, RailEventKind::kRailDown);
  tree.gid(3, kIpv4, "RoCE v2", "eth1");
  EXPECT_EQ(next().kind, RailEventKind::kRailUp);
}

TEST_F(ReplacedPort, WhatChangesNothingOfItsAddressIsNotReported) {
  open();
  tree.gid(4, kOtherIpv4, "RoCE v2", "eth1");
  library->happens(IBV_EVENT_GID_CHANGE, 1);
  library->happens(IBV_EVENT_GID_CHANGE, 2);
  library->happens(IBV_EVENT_PORT_ERR, 2);
  library->happens(IBV_EVENT_PORT_ERR, 1);
  const RailEvent event = next();
  EXPECT_EQ(event.kind, RailEventKind::kRailDown);
  EXPECT_EQ(event.status.raw, IBV_EVENT_PORT_ERR);
  EXPECT_TRUE(states("port is not active")) << rail->info().version;
}

// On InfiniBand peers know the LID, which another subnet manager may give anew.
TEST_F(ReplacedPort, AnotherLidIsAnotherAddress) {
  library->link_layer = IBV_LINK_LAYER_INFINIBAND;
  library->lid = 17;
  tree.gid(0, kLinkLocal, "IB/RoCE v1");
  open();
  library->lid = 18;
  library->happens(IBV_EVENT_LID_CHANGE, 1);
  EXPECT_EQ(next().kind, RailEventKind::kRailDown);
  library->lid = 17;
  library->happens(IBV_EVENT_CLIENT_REREGISTER, 1);
  EXPECT_EQ(next().kind, RailEventKind::kRailUp);
}

// A port that comes back without its address stays down; new paths leave from where the address stands then.
TEST_F(ReplacedPort, AnAddressThatMovedInTheTableIsFollowed) {
  options.traffic_class = 104;
  open();
  library->happens(IBV_EVENT_PORT_ERR, 1);
  EXPECT_EQ(next().kind, RailEventKind::kRailDown);
  tree.no_gid(3);
  tree.gid(6, kIpv4, "RoCE v2", "eth1");
  library->happens(IBV_EVENT_PORT_ACTIVE, 1);
  EXPECT_EQ(next().kind, RailEventKind::kRailUp);
  std::unique_ptr<RailPeer> peer;
  ASSERT_TRUE(rail->connect(rail->address(), 1, &peer).ok());
  EXPECT_EQ(next().kind, RailEventKind::kPeerLost) << "nothing carries here";
  rail.reset();  // the service thread makes the path after that news, for its goodbye, and ends here
  EXPECT_EQ(library->newest_path().grh.sgid_index, 6);
  EXPECT_EQ(library->newest_path().grh.traffic_class, 104);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
