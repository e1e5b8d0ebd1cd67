// port.cc: see port.h.
#include "providers/verbs/port.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <memory>

namespace asyncfabric::verbs {
namespace {

struct CloseFile {
  void operator()(FILE* file) const { std::fclose(file); }
};

// Entries without a GID cannot be read (EINVAL): the line stays empty.
std::string first_line(const std::string& path) {
  const std::unique_ptr<FILE, CloseFile> file(std::fopen(path.c_str(), "re"));
  std::array<char, 256> line{};
  if (!file || std::fgets(line.data(), line.size(), file.get()) == nullptr) return {};
  const std::string text = line.data();
  return text.substr(0, text.find('\n'));
}

// "0000:0000:0000:0000:0000:ffff:0a00:0101"
bool parse_gid(const std::string& text, Gid* out) {
  if (text.size() != 39) return false;
  for (size_t group = 0; group < 8; ++group) {
    uint16_t value = 0;
    const char* begin = text.data() + group * 5;
    const auto [end, error] = std::from_chars(begin, begin + 4, value, 16);
    if (error != std::errc() || end != begin + 4 || (group < 7 && *end != ':')) return false;
    (*out)[group * 2] = static_cast<uint8_t>(value >> 8);
    (*out)[group * 2 + 1] = static_cast<uint8_t>(value);
  }
  return std::any_of(out->begin(), out->end(), [](uint8_t byte) { return byte != 0; });
}

bool is_ipv4(const Gid& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) && gid[10] == 0xff &&
         gid[11] == 0xff;
}

bool is_link_local(const Gid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

constexpr int kBest = 4;

int worth(const GidChoice& choice) {
  if (choice.type != "RoCE v2") return 1;
  if (is_ipv4(choice.gid)) return kBest;
  return is_link_local(choice.gid) ? 2 : 3;
}

}  // namespace

bool choose_gid(const std::string& root, const std::string& device, uint32_t port, uint32_t table, bool ethernet,
                int32_t wanted, GidChoice* out, std::string* detail) {
  const std::string folder = root + "/" + device + "/ports/" + std::to_string(port);
  int best = 0;
  const uint32_t first = wanted >= 0 ? static_cast<uint32_t>(wanted) : 0;
  const uint32_t end = wanted >= 0 ? first + 1 : ethernet ? table : std::min(table, 1u);
  for (uint32_t index = first; index < end && best < kBest; ++index) {
    GidChoice found;
    found.index = index;
    if (!parse_gid(first_line(folder + "/gids/" + std::to_string(index)), &found.gid)) continue;
    found.type = first_line(folder + "/gid_attrs/types/" + std::to_string(index));
    const int value = worth(found);
    if (value <= best) continue;
    best = value;
    *out = found;
  }
  if (best != 0) return true;
  *detail = "port " + std::to_string(port) + " of " + device +
            (wanted >= 0 ? " has no GID at index " + std::to_string(wanted)
                         : " has no GID: on Ethernet its interface needs an IP address") +
            " (" + folder + "/gids)";
  return false;
}

}  // namespace asyncfabric::verbs
