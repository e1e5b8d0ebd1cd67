// identity.cc: see identity.h.
#include "providers/local/peers/identity.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace asyncfabric::local {
namespace {

constexpr uint32_t kAddressMagic = 0x314c4641;  // "AFL1"
constexpr size_t kSocketNameMax = 100;          // sockaddr_un takes 107 behind the zero byte

std::string read_text(const char* path) {
  const UniqueFd fd(open(path, O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  char buffer[1024];
  const ssize_t got = read(fd.get(), buffer, sizeof buffer);
  return got > 0 ? std::string(buffer, static_cast<size_t>(got)) : std::string();
}

uint64_t inode_of(const char* path) {
  struct stat facts{};
  return stat(path, &facts) == 0 ? facts.st_ino : 0;
}

HostIdentity find_host_identity() {
  ByteWriter facts;
  facts.put_string<uint32_t>(read_text("/proc/sys/kernel/random/boot_id"));
  facts.put(inode_of("/proc/self/ns/pid"));
  facts.put(inode_of("/proc/self/ns/net"));  // abstract sockets live in it
  facts.put(static_cast<uint64_t>(geteuid()));
  HostIdentity identity;
  identity.high = checksum(facts.text());
  facts.put(uint64_t{0x9e3779b97f4a7c15});
  identity.low = checksum(facts.text());
  return identity;
}

}  // namespace

const HostIdentity& host_identity() {
  static const HostIdentity identity = find_host_identity();
  return identity;
}

ProcessState process_state(pid_t pid) {
  constexpr int kFlags = 9, kStart = 22;     // fields, as proc(5) counts them
  constexpr uint64_t kExiting = 0x00000004;  // PF_EXITING of the kernel
  const std::string text = read_text(("/proc/" + std::to_string(pid) + "/stat").c_str());
  // The second field is the program's name in parentheses and may contain anything: count from the last ')'.
  size_t at = text.rfind(')');
  ProcessState state;
  for (int field = 3; at != std::string::npos && field <= kStart; ++field) {
    at = text.find(' ', at + 1);
    if (at == std::string::npos) return {};
    const char* value = text.c_str() + at + 1;
    if (field == kFlags) state.leaving = (std::strtoull(value, nullptr, 10) & kExiting) != 0;
    if (field == kStart) state.start = std::strtoull(value, nullptr, 10);
  }
  return state;
}

uint64_t random_word() {
  uint64_t word = 0;
  if (getrandom(&word, sizeof word, 0) != static_cast<ssize_t>(sizeof word))
    word = now_ns() ^ (static_cast<uint64_t>(getpid()) << 32);
  return word | 1;  // never 0
}

std::string encode_address(const RailAddress& address) {
  ByteWriter out;
  out.put(kAddressMagic);
  out.put(address.host.high);
  out.put(address.host.low);
  out.put(address.pid);
  out.put(address.process_start);
  out.put(address.rail_id);
  out.put_string<uint8_t>(address.socket);
  return std::move(out.text());
}

Status decode_address(std::string_view bytes, RailAddress* out) {
  ByteReader in(bytes);
  if (in.get<uint32_t>() != kAddressMagic) return StatusCode::kInvalidArgument;
  RailAddress address;
  address.host.high = in.get<uint64_t>();
  address.host.low = in.get<uint64_t>();
  address.pid = in.get<int32_t>();
  address.process_start = in.get<uint64_t>();
  address.rail_id = in.get<uint64_t>();
  address.socket = in.get_string<uint8_t>();
  if (!in.done() || address.pid <= 0 || address.rail_id == 0 || address.socket.empty() ||
      address.socket.size() > kSocketNameMax)
    return StatusCode::kInvalidArgument;
  *out = std::move(address);
  return {};
}

}  // namespace asyncfabric::local
