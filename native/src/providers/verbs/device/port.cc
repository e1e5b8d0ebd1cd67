// port.cc: see port.h.
#include "providers/verbs/device/port.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
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

// "unknown" is what interfaces without a carrier report, such as dummies.
bool is_up(const std::string& state) { return state.empty() || state == "up" || state == "unknown"; }

bool is_vlan(const std::string& root, const std::string& netdev) {
  const std::unique_ptr<FILE, CloseFile> file(std::fopen((root + "/net/" + netdev + "/uevent").c_str(), "re"));
  std::array<char, 256> line{};
  while (file && std::fgets(line.data(), line.size(), file.get()) != nullptr)
    if (std::strcmp(line.data(), "DEVTYPE=vlan\n") == 0) return true;
  return false;
}

int worth(const GidChoice& choice) {
  const int family = is_ipv4(choice.gid) ? 2 : is_link_local(choice.gid) ? 0 : 1;
  return 1 + (choice.up ? 12 : 0) + (choice.type == "RoCE v2" ? 6 : 0) + family * 2 + (choice.vlan ? 0 : 1);
}

bool allowed(const GidWish& wish, const GidChoice& choice) {
  if (wish.by_gid && wish.gid != choice.gid) return false;
  if (!wish.type.empty() && wish.type != choice.type) return false;
  return wish.netdev.empty() || wish.netdev == choice.netdev;
}

std::string address_text(const Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_ipv4(gid)) return inet_ntop(AF_INET, gid.data() + 12, text.data(), text.size());
  return inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
}

std::string wish_text(const GidWish& wish) {
  if (wish.index >= 0) return " at index " + std::to_string(wish.index);
  if (wish.by_gid) return " with the address " + address_text(wish.gid);
  return " on the interface " + wish.netdev;
}

}  // namespace

std::string GidChoice::text() const {
  std::string words = std::to_string(index) + " (" + (type.empty() ? "" : type + ", ") + address_text(gid);
  if (!netdev.empty()) words += " on " + netdev + (vlan ? ", a VLAN" : "");
  return words + ")";
}

bool parse_gid_wish(const std::string& text, GidWish* out) {
  *out = {};
  const char* end = text.data() + text.size();
  if (const auto [stop, error] = std::from_chars(text.data(), end, out->index); error == std::errc() && stop == end)
    return out->index >= 0 && out->index <= 65535;
  out->index = -1;
  if (inet_pton(AF_INET, text.c_str(), out->gid.data() + 12) == 1) {
    out->gid[10] = out->gid[11] = 0xff;
    out->by_gid = true;
  } else if (inet_pton(AF_INET6, text.c_str(), out->gid.data()) == 1) {
    out->by_gid = true;
  } else if (text.find_first_of(":/ ") == std::string::npos) {
    out->netdev = text;
  }
  return out->asked();
}

bool choose_gid(const std::string& root, const std::string& device, uint32_t port, uint32_t table, bool ethernet,
                const GidWish& wish, GidChoice* out, std::string* detail) {
  const std::string folder = root + "/infiniband/" + device + "/ports/" + std::to_string(port);
  int best = 0;
  const uint32_t first = wish.index >= 0 ? static_cast<uint32_t>(wish.index) : 0;
  const uint32_t end = wish.index >= 0 ? first + 1 : ethernet || wish.asked() ? table : std::min(table, 1u);
  for (uint32_t index = first; index < end; ++index) {
    GidChoice found;
    found.index = index;
    if (!parse_gid(first_line(folder + "/gids/" + std::to_string(index)), &found.gid)) continue;
    found.type = first_line(folder + "/gid_attrs/types/" + std::to_string(index));
    found.netdev = first_line(folder + "/gid_attrs/ndevs/" + std::to_string(index));
    if (!allowed(wish, found)) continue;
    if (!found.netdev.empty()) {
      found.up = is_up(first_line(root + "/net/" + found.netdev + "/operstate"));
      found.vlan = is_vlan(root, found.netdev);
    }
    const int value = worth(found);
    if (value <= best) continue;
    best = value;
    *out = found;
  }
  if (best != 0) return true;
  *detail =
      "port " + std::to_string(port) + " of " + device +
      (wish.asked() ? " has no GID" + wish_text(wish) : " has no GID: on Ethernet its interface needs an IP address") +
      " (" + folder + "/gids)";
  return false;
}

// "800 Gb/sec (4X XDR)"
double rate_of_port(const std::string& root, const std::string& device, uint32_t port) {
  const std::string text = first_line(root + "/infiniband/" + device + "/ports/" + std::to_string(port) + "/rate");
  double gbits = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, gbits);
  return error == std::errc() && std::string_view(stop, end).starts_with(" Gb/sec") ? gbits : 0;
}

}  // namespace asyncfabric::verbs
