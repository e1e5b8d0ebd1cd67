// replaced_port.h: verbs rails over a library that the test replaces (replaced_verbs.h), and a tree like the kernel's that they read.
#pragma once

#include <filesystem>
#include <fstream>

#include "replaced_verbs.h"
#include "rigs/replaced_library.h"
#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {

using testing::ReplacedLibrary;
using testing::ReplacedVerbs;

inline constexpr const char* kLinkLocal = "fe80:0000:0000:0000:0202:c9ff:fe12:3456";
inline constexpr const char* kIpv4 = "0000:0000:0000:0000:0000:ffff:0a00:0102";
inline constexpr const char* kOtherIpv4 = "0000:0000:0000:0000:0000:ffff:0a00:0203";
inline constexpr const char* kGlobal = "2001:0db8:0000:0000:0000:0000:0000:0001";

// /sys/class as the kernel shows it, in a folder of its own.
struct SysTree {
  SysTree() {
    root = std::filesystem::path(::testing::TempDir()) / ("asyncfabric_sys_" + std::to_string(getpid()));
    std::filesystem::remove_all(root);
    for (const char* folder : {"gids", "gid_attrs/types", "gid_attrs/ndevs"})
      std::filesystem::create_directories(root / port / folder);
  }
  ~SysTree() { std::filesystem::remove_all(root); }
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text << "\n";
  }
  void gid(uint32_t index, const std::string& gid, const std::string& type, const std::string& netdev = "") const {
    write(port / "gids" / std::to_string(index), gid);
    write(port / "gid_attrs/types" / std::to_string(index), type);
    if (!netdev.empty()) write(port / "gid_attrs/ndevs" / std::to_string(index), netdev);
  }
  void no_gid(uint32_t index) const { std::filesystem::remove(root / port / "gids" / std::to_string(index)); }
  void netdev(const std::string& name, const std::string& state, const std::string& type = "") const {
    write(std::filesystem::path("net") / name / "operstate", state);
    write(std::filesystem::path("net") / name / "uevent",
          (type.empty() ? "" : "DEVTYPE=" + type + "\n") + "INTERFACE=" + name);
  }
  int chosen(const std::string& wish = "", bool ethernet = true) {
    verbs::GidWish parsed;
    verbs::GidChoice choice;
    detail.clear();
    EXPECT_TRUE(wish.empty() || verbs::parse_gid_wish(wish, &parsed)) << wish;
    if (!verbs::choose_gid(root, "mlx5_7", 1, 8, ethernet, parsed, &choice, &detail)) return -1;
    text = choice.text();
    return static_cast<int>(choice.index);
  }
  std::filesystem::path root;
  const std::filesystem::path port = "infiniband/mlx5_7/ports/1";
  std::string detail;
  std::string text;
};

// One rail, and whatever a test opens beside it.
struct ReplacedPort : ::testing::Test {
  ReplacedPort() : replaced(ASYNCFABRIC_REPLACED_VERBS), library(replaced.decisions<ReplacedVerbs>("replaced_verbs")) {
    tree.netdev("eth1", "up");
    tree.gid(3, kIpv4, "RoCE v2", "eth1");
    options.sysfs = tree.root;
  }
  Status open_rail(std::unique_ptr<Rail>* out, std::string* detail) const {
    const verbs::Library* loaded = verbs::open_library(replaced.path(), detail);
    return loaded != nullptr ? verbs::VerbsRail::open(*loaded, options, out, detail) : StatusCode::kNoProvider;
  }
  void open() {
    std::string detail;
    ASSERT_TRUE(open_rail(&rail, &detail).ok()) << detail;
  }
  // The next thing that the rail reports.
  RailEvent next() {
    RailEvent event;
    const uint64_t until = now_ns() + 20 * kSecond;
    while (rail->poll({&event, 1}) == 0)
      if (now_ns() > until) {
        ADD_FAILURE() << "nothing was reported";
        break;
      }
    return event;
  }
  bool states(const std::string& text) const { return rail->info().version.find(text) != std::string::npos; }

  SysTree tree;
  ReplacedLibrary replaced;
  ReplacedVerbs* library;
  verbs::Options options;
  std::unique_ptr<Rail> rail;
};

}  // namespace asyncfabric::verbs_rig
