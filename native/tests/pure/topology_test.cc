// topology_test.cc: the small pure parts of the topology: lists, numbers, names, distances, and the assignment against
// every possible one. Whole machines are in the Python tests, which build their trees.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "topology/choice.h"
#include "topology/matching.h"
#include "topology/pci.h"
#include "topology/proximity.h"
#include "topology/tree.h"

namespace asyncfabric::topology {
namespace {

using Costs = std::vector<std::vector<int64_t>>;

int64_t sum_of(const Costs& costs, const std::vector<uint32_t>& columns) {
  int64_t sum = 0;
  for (size_t row = 0; row < costs.size(); ++row) sum += costs[row][columns[row]];
  return sum;
}

int64_t cheapest_by_trying(const Costs& costs) {
  std::vector<uint32_t> columns(costs.front().size());
  std::iota(columns.begin(), columns.end(), 0);
  int64_t best = sum_of(costs, columns);
  while (std::next_permutation(columns.begin(), columns.end())) best = std::min(best, sum_of(costs, columns));
  return best;
}

TEST(Matching, IsAsCheapAsTheBestOfAllChoices) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t columns = 1 + random() % 6;
    const size_t rows = 1 + random() % columns;
    const int64_t spread = round % 3 == 0   ? 3
                           : round % 3 == 1 ? 1000
                                            : 1ll << 52;  // ties, ordinary, as large as allowed
    Costs costs(rows, std::vector<int64_t>(columns));
    for (auto& row : costs)
      for (int64_t& cost : row) cost = static_cast<int64_t>(random()) * 1048583 % spread;
    const std::vector<uint32_t> chosen = cheapest_columns(costs);
    ASSERT_EQ(chosen.size(), rows);
    std::vector<uint32_t> distinct = chosen;
    std::sort(distinct.begin(), distinct.end());
    ASSERT_EQ(std::unique(distinct.begin(), distinct.end()), distinct.end());
    ASSERT_EQ(sum_of(costs, chosen), cheapest_by_trying(costs)) << "round " << round;
  }
}

TEST(Matching, OfNothingIsNothing) { EXPECT_TRUE(cheapest_columns({}).empty()); }

Nic nic_at(const Place& place) {
  Nic nic;
  nic.kind = NicKind::kRoce;
  nic.up = true;
  nic.place = place;
  return nic;
}

Gpu gpu_at(const Place& place) {
  Gpu gpu;
  gpu.place = place;
  return gpu;
}

// Greedy by distance takes GPU 0's switch NIC first and leaves GPU 1 the far one; giving way costs GPU 0 little.
TEST(Choice, TakesTheSmallestSumAndNotTheNearestPairFirst) {
  Topology machine;
  machine.nodes = {{0, {0}, {10, 21}, 0}, {1, {1}, {21, 10}, 0}};
  machine.gpus = {gpu_at({"0000:02:00.0", {"pci0000:00", "0000:00:01.0", "0000:02:00.0"}, kNoNode}),
                  gpu_at({"0000:05:00.0", {"pci0000:00", "0000:05:00.0"}, 0})};
  machine.nics = {nic_at({"0000:03:00.0", {"pci0000:00", "0000:00:01.0", "0000:03:00.0"}, 0}),
                  nic_at({"0000:06:00.0", {"pci0000:00", "0000:06:00.0"}, 1})};
  ASSERT_EQ(distance_between(machine.gpus[0].place, machine.nics[0].place), Distance::kSwitch);
  ASSERT_EQ(distance_between(machine.gpus[1].place, machine.nics[1].place), Distance::kFar);
  choose_nics(machine);
  EXPECT_EQ(machine.groups[0].nics, std::vector<uint32_t>{1});
  EXPECT_EQ(machine.groups[1].nics, std::vector<uint32_t>{0});
}

TEST(Choice, LeavesStrangersSpareAlsoWhereGpusShareANic) {
  Topology machine;
  machine.nodes = {{0, {0}, {10}, 0}};
  machine.gpus = {gpu_at({"0000:02:00.0", {"pci0000:00", "0000:00:01.0", "0000:02:00.0"}, 0}),
                  gpu_at({"0000:03:00.0", {"pci0000:00", "0000:00:01.0", "0000:03:00.0"}, 0})};
  machine.nics = {nic_at({"0000:04:00.0", {"pci0000:00", "0000:00:01.0", "0000:04:00.0"}, 0}),
                  nic_at({"0000:81:00.0", {"pci0000:80", "0000:81:00.0"}, 0})};
  choose_nics(machine);
  EXPECT_EQ(machine.groups[0].nics, std::vector<uint32_t>{0});
  EXPECT_EQ(machine.groups[1].nics, std::vector<uint32_t>{0});
  EXPECT_EQ(machine.spare_nics, std::vector<uint32_t>{1});
}

TEST(Lists, AreReadAsTheKernelWritesThem) {
  EXPECT_EQ(parse_list("0-3,8,10-11"), (std::vector<uint32_t>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_list("3,1,1-2"), (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_TRUE(parse_list("").empty());
  EXPECT_EQ(parse_list("x,5-2,-1,7,9-,0-99999999999"), (std::vector<uint32_t>{7}));
}

TEST(Numbers, AreWholeOrNothing) {
  EXPECT_EQ(parse_number("-1"), -1);
  EXPECT_EQ(parse_number("0x10de"), 0x10de);
  EXPECT_EQ(parse_number("0xEFA2"), 0xefa2);
  for (const char* odd : {"", "-", "0x", "12a", "1 2", "9999999999999999"}) EXPECT_FALSE(parse_number(odd)) << odd;
}

TEST(Names, OfDevicesSortAsPeopleCount) {
  std::vector<std::string> names = {"mlx5_10", "mlx5_2", "eth0", "mlx5_02", "mlx5", "0000:9d:00.0", "0000:43:00.0"};
  std::sort(names.begin(), names.end(), natural_less);
  EXPECT_EQ(names,
            (std::vector<std::string>{"0000:9d:00.0", "0000:43:00.0", "eth0", "mlx5", "mlx5_02", "mlx5_2", "mlx5_10"}));
  for (const std::string& one : names) EXPECT_FALSE(natural_less(one, one));
}

TEST(Addresses, OfPciAreReported) {
  for (const char* good : {"0000:1b:00.0", "10000:e1:00.7", "0000:ff:1f.3"}) EXPECT_TRUE(is_pci_address(good)) << good;
  for (const char* bad : {"1b:00.0", "0000:1b:00.8", "0000:1b:00", "0000:1b:00.0x", "pci0000:1b", "", "zzzz:1b:00.0"})
    EXPECT_FALSE(is_pci_address(bad)) << bad;
}

Place place(const std::string& address, std::vector<std::string> path, int32_t node) {
  path.push_back(address);
  return {address, std::move(path), node};
}

TEST(Distances, FollowWhatThePathsShare) {
  const Place gpu = place("0000:05:00.0", {"pci0000:00", "0000:00:01.0", "0000:03:00.0"}, 0);
  const Place switched = place("0000:06:00.0", {"pci0000:00", "0000:00:01.0", "0000:04:00.0"}, 0);
  const Place function = place("0000:05:00.1", {"pci0000:00", "0000:00:01.0", "0000:03:00.0"}, 0);
  const Place rooted = place("0000:07:00.0", {"pci0000:00", "0000:00:02.0"}, 0);
  const Place socketed = place("0000:87:00.0", {"pci0000:80", "0000:80:02.0"}, 0);
  const Place far = place("0000:c7:00.0", {"pci0000:c0", "0000:c0:02.0"}, 1);
  const Place flat_far = place("0000:08:00.0", {"pci0000:00"}, 1);
  const Place unknown = place("0000:c8:00.0", {"pci0000:c1"}, kNoNode);
  EXPECT_EQ(distance_between(gpu, function), Distance::kSame);
  EXPECT_EQ(distance_between(gpu, switched), Distance::kSwitch);
  EXPECT_EQ(distance_between(gpu, rooted), Distance::kRootComplex);
  EXPECT_EQ(distance_between(gpu, socketed), Distance::kNode);
  EXPECT_EQ(distance_between(gpu, far), Distance::kFar);
  EXPECT_EQ(distance_between(gpu, flat_far), Distance::kFar) << "nodes that are known and differ beat a common bridge";
  EXPECT_EQ(distance_between(gpu, unknown), Distance::kFar);
  EXPECT_EQ(distance_between({}, {}), Distance::kFar) << "two devices without a place are not one device";
}

TEST(Distances, OfNodesAreSymmetricAlsoInBrokenTables) {
  const std::vector<NumaNode> nodes = {{0, {}, {10, 32}, 0}, {2, {}, {21, 10}, 0}};
  EXPECT_EQ(node_distance(nodes, 0, 2), 32u);
  EXPECT_EQ(node_distance(nodes, 2, 0), 32u);
  EXPECT_EQ(node_distance(nodes, 2, 2), 10u);
  EXPECT_EQ(node_distance(nodes, 0, 1), node_distance(nodes, kNoNode, 0));
}

class OddTree : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/asyncfabric-topology-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::string root_;
};

TEST_F(OddTree, NeverBlocksAndNeverGrows) {
  const Tree tree(root_ + "/");
  ASSERT_EQ(mkfifo((root_ + "/fifo").c_str(), 0600), 0);
  std::ofstream(root_ + "/large") << std::string(1 << 20, 'x');
  std::ofstream(root_ + "/zeros").write("abc\n\0\0", 6);
  std::filesystem::create_symlink("loop", root_ + "/loop");
  std::filesystem::create_symlink("/etc", root_ + "/outside");
  std::filesystem::create_symlink("../drivers/nvidia", root_ + "/driver");
  EXPECT_EQ(tree.text("fifo"), "");
  EXPECT_EQ(tree.text("."), "");
  EXPECT_EQ(tree.text("none"), "");
  EXPECT_EQ(tree.text("zeros"), "abc");
  EXPECT_LE(tree.text("large").size(), 64u * 1024);
  EXPECT_EQ(tree.text("loop"), "");
  EXPECT_EQ(tree.resolved("loop"), "");
  EXPECT_EQ(tree.resolved("outside"), "") << "a path out of the tree shows nothing about the machine";
  EXPECT_EQ(tree.link_name("driver"), "nvidia") << "also when it leads nowhere";
}

TEST_F(OddTree, ThatDoesNotExistIsAnEmptyMachine) {
  const Topology nothing = read_topology(root_ + "/none");
  EXPECT_TRUE(nothing.gpus.empty());
  EXPECT_TRUE(nothing.nics.empty());
  ASSERT_EQ(nothing.groups.size(), 1u);
  EXPECT_EQ(nothing.groups[0].worker_cpu, kNoCpu);
}

}  // namespace
}  // namespace asyncfabric::topology
