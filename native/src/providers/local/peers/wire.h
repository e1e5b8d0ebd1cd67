// wire.h: what travels over a connection's unix socket: the handshake, then keys that are shown, for what they are of.
// SOCK_SEQPACKET keeps message borders; descriptors ride along. Used by the control thread (connecting side) and the
// service thread (accepting side). Layouts are private to one version of this library on one host.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric::local {

constexpr size_t kMaxFds = 3;
using FdPack = std::array<UniqueFd, kMaxFds>;

enum class WireKind : uint32_t { kHello = 1, kWelcome = 2, kShow = 3, kShown = 4 };

// One layout for all messages: the fields that a kind does not use are 0.
struct WireMessage {
  uint32_t magic = 0;
  WireKind kind = WireKind::kHello;
  uint32_t version = 0;
  uint32_t status = 0;         // kWelcome, kShown: a StatusCode
  uint64_t target_rail = 0;    // kHello: the rail that is meant
  uint64_t rail = 0;           // kHello, kWelcome: the sender's rail
  uint64_t process_start = 0;  // kHello
  uint32_t entries = 0;        // kHello: ring size
  uint32_t number = 0;         // kShow, kShown: of the question
  uint32_t slot = 0;           // kShow
  uint32_t fds = 0;            // how many descriptors ride along
  uint64_t word = 0;           // kShow: of the key
  uint32_t part = 0;           // kShow: which of the region's files
  uint32_t raw = 0;            // kWelcome, kShown: the system's number for the status
  uint64_t mark = 0;           // kShown, and the rest: see Shown
  uint64_t life = 0;
  uint64_t base = 0;
  uint64_t length = 0;
  uint64_t traits = 0;
};
// Descriptors: kHello {segment, board, doorbell}; kWelcome {board}; kShown {region} or nothing.

WireMessage wire_message(WireKind kind);

// kBusy: the socket would block. kPeerDead: it is closed.
Status send_wire(int socket, const WireMessage& message, std::array<int, kMaxFds> fds);
// kBusy: nothing there. kPeerDead: closed. kPeerRejected: not our format. kNoMemory: this process had no room for its
// descriptors, which are lost; the rest of the message is in *message.
Status receive_wire(int socket, WireMessage* message, FdPack* fds);
// Waits for one message of `kind` until `deadline_ns` (monotonic clock). kTimeout.
Status await_wire(int socket, WireKind kind, uint64_t deadline_ns, WireMessage* message, FdPack* fds);

Status listen_abstract(const std::string& name, UniqueFd* out);
// Waits while the listener's backlog is full, at most until `deadline_ns`: kBusy then.
Status connect_abstract(const std::string& name, uint64_t deadline_ns, UniqueFd* out);

struct PeerCredentials {
  int32_t pid = 0;
  bool same_user = false;
};
PeerCredentials peer_credentials(int socket);

}  // namespace asyncfabric::local
