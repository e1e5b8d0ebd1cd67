// cpus.cc: NUMA nodes, online and allowed CPUs, and which CPUs are one physical core.
#include <algorithm>

#include "topology/devices.h"

namespace asyncfabric::topology {
namespace {

constexpr const char* kNodes = "sys/devices/system/node";
constexpr const char* kCpus = "sys/devices/system/cpu";

std::vector<uint32_t> intersection(const std::vector<uint32_t>& one, const std::vector<uint32_t>& other) {
  std::vector<uint32_t> out;
  std::set_intersection(one.begin(), one.end(), other.begin(), other.end(), std::back_inserter(out));
  return out;
}

// "Node 0 MemTotal:       65704560 kB"
uint64_t memory_of(const Tree& tree, const std::string& folder) {
  const std::string text = tree.text(folder + "/meminfo");
  for (const std::string_view line : split(text, '\n')) {
    const std::vector<std::string_view> words = split(line, ' ');
    if (words.size() >= 4 && words[2] == "MemTotal:")
      return static_cast<uint64_t>(std::max<int64_t>(0, parse_number(words[3]).value_or(0))) * 1024;
  }
  return 0;
}

// One word for each online node, in their order.
std::vector<uint32_t> distances_of(const Tree& tree, const std::string& folder) {
  std::vector<uint32_t> out;
  const std::string text = tree.text(folder + "/distance");
  for (const std::string_view word : split(text, ' '))
    out.push_back(static_cast<uint32_t>(std::clamp<int64_t>(parse_number(word).value_or(0), 0, 255)));
  return out;
}

}  // namespace

std::vector<uint32_t> read_online_cpus(const Tree& tree) {
  std::vector<uint32_t> cpus = parse_list(tree.text(std::string(kCpus) + "/online"));
  if (!cpus.empty()) return cpus;
  for (const std::string& name : tree.names(kCpus)) {  // a partial copy
    const std::optional<int64_t> number = name.starts_with("cpu") ? parse_number(name.substr(3)) : std::nullopt;
    if (number && *number >= 0 && *number < 1 << 16) cpus.push_back(static_cast<uint32_t>(*number));
  }
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

std::vector<NumaNode> read_nodes(const Tree& tree, Notes& notes) {
  std::vector<NumaNode> nodes;
  for (const std::string& name : tree.names(kNodes)) {
    const std::optional<int64_t> id = name.starts_with("node") ? parse_number(name.substr(4)) : std::nullopt;
    if (!id || *id < 0 || *id > 1 << 16) continue;  // has_cpu, online, possible and the like
    const std::string folder = std::string(kNodes) + "/" + name;
    NumaNode node;
    node.id = static_cast<int32_t>(*id);
    node.cpus = parse_list(tree.text(folder + "/cpulist"));
    node.distances = distances_of(tree, folder);
    node.memory_bytes = memory_of(tree, folder);
    nodes.push_back(std::move(node));
  }
  if (nodes.empty()) {  // a kernel without NUMA
    NumaNode whole;
    whole.cpus = read_online_cpus(tree);
    nodes.push_back(std::move(whole));
    notes.push_back("no NUMA nodes in sys/devices/system/node: taken for one node with all CPUs");
  }
  std::sort(nodes.begin(), nodes.end(), [](const NumaNode& one, const NumaNode& other) { return one.id < other.id; });
  for (NumaNode& node : nodes) {
    if (node.distances.size() == nodes.size()) continue;
    if (!node.distances.empty())
      notes.push_back("node" + std::to_string(node.id) + ": " + std::to_string(node.distances.size()) +
                      " distances for " + std::to_string(nodes.size()) + " nodes: taken for 10 and 20");
    node.distances.assign(nodes.size(), 20);
    node.distances[static_cast<size_t>(&node - nodes.data())] = 10;
  }
  return nodes;
}

std::vector<uint32_t> read_allowed_cpus(const Tree& tree, Notes& notes) {
  constexpr std::string_view kKey = "Cpus_allowed_list:";
  const std::vector<uint32_t> online = read_online_cpus(tree);
  const std::string status = tree.text("proc/self/status");
  for (const std::string_view line : split(status, '\n')) {
    if (!line.starts_with(kKey)) continue;
    std::vector<uint32_t> allowed = parse_list(line.substr(kKey.size()));
    if (!online.empty()) allowed = intersection(allowed, online);
    if (!allowed.empty()) return allowed;
    notes.push_back("proc/self/status allows no CPU that is online: all online CPUs are taken");
  }
  return online;
}

std::vector<uint32_t> read_core_of_cpus(const Tree& tree, const std::vector<uint32_t>& cpus) {
  std::vector<uint32_t> cores;
  for (const uint32_t cpu : cpus) {
    const std::string folder = std::string(kCpus) + "/cpu" + std::to_string(cpu) + "/topology";
    const std::vector<uint32_t> siblings = parse_list(tree.text(folder + "/thread_siblings_list"));
    const bool sane = std::binary_search(siblings.begin(), siblings.end(), cpu);
    cores.push_back(sane ? siblings.front() : cpu);
  }
  return cores;
}

}  // namespace asyncfabric::topology
