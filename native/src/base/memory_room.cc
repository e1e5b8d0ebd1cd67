// memory_room.cc: see memory_room.h.
#include "base/memory_room.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace asyncfabric {
namespace {

constexpr uint64_t kUnbounded = ~uint64_t{0};

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// "max", or nothing there: no bound.
uint64_t number_of(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : otherwise;
}

// The value behind a word at the begin of a line: of memory.stat, or of meminfo.
uint64_t value_of(const std::string& text, const std::string& word) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == word) return value;
  }
  return 0;
}

struct Names {
  const char* most;
  const char* taken;
  const char* active_file;
  const char* inactive_file;
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"};
constexpr Names kVersion2{"memory.max", "memory.current", "active_file", "inactive_file"};

uint64_t room_of_group(const std::string& folder, const Names& names) {
  const uint64_t most = number_of(folder + "/" + names.most, kUnbounded);
  if (most >= kUnbounded / 4) return kUnbounded;  // version 1 writes a number of that size
  const std::string stat = text_of(folder + "/memory.stat");
  // What the kernel drops when room is wanted: pages of files, and its own tables of them (reported in version 2 alone).
  const uint64_t cached =
      value_of(stat, names.active_file) + value_of(stat, names.inactive_file) + value_of(stat, "slab_reclaimable");
  const uint64_t taken = number_of(folder + "/" + names.taken, 0);
  const uint64_t firm = taken - std::min(taken, cached);
  return most - std::min(most, firm);
}

uint64_t room_of_groups(const std::string& base, std::string path, const Names& names) {
  uint64_t room = kUnbounded;
  for (;;) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    room = std::min(room, room_of_group(base + path, names));
    if (path.empty()) return room;
    const size_t cut = path.rfind('/');
    path.erase(cut == std::string::npos ? 0 : cut);
  }
}

}  // namespace

uint64_t memory_room_bytes(const std::string& root) {
  uint64_t room = kUnbounded;
  std::istringstream groups(text_of(root + "/proc/self/cgroup"));
  std::string line;
  while (std::getline(groups, line)) {
    // "4:memory:/path" in version 1, "0::/path" in version 2
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string kind = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (kind == ",,")
      room = std::min(room, room_of_groups(root + "/sys/fs/cgroup", path, kVersion2));
    else if (kind.find(",memory,") != std::string::npos)
      room = std::min(room, room_of_groups(root + "/sys/fs/cgroup/memory", path, kVersion1));
  }
  const std::string machine = text_of(root + "/proc/meminfo");
  if (const uint64_t kilobytes = value_of(machine, "MemTotal:"); kilobytes != 0)
    room = std::min(room, kilobytes * 1024);
  const uint64_t swap = value_of(machine, "SwapFree:") * 1024;
  return room > kUnbounded - swap ? kUnbounded : room + swap;
}

}  // namespace asyncfabric
