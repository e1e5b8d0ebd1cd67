// doorbell.cc: see doorbell.h.
#include "providers/local/transfers/doorbell.h"

#include <sys/socket.h>
#include <cerrno>

namespace asyncfabric::local {
namespace {

int socket_fact(int fd, int which) {
  int value = -1;
  socklen_t length = sizeof value;
  return getsockopt(fd, SOL_SOCKET, which, &value, &length) == 0 ? value : -1;
}

// Both ends of a pair carry the name of the process that made it, so nobody passes off a socket that leads to somebody else.
bool is_pair_of(pid_t peer, int fd) {
  ucred maker{};
  socklen_t length = sizeof maker;
  return socket_fact(fd, SO_DOMAIN) == AF_UNIX && socket_fact(fd, SO_TYPE) == SOCK_STREAM &&
         getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &maker, &length) == 0 && maker.pid == peer;
}

}  // namespace

Status Doorbell::make(UniqueFd* ours, UniqueFd* theirs) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return {StatusCode::kNoMemory, errno};
  *ours = UniqueFd(ends[0]);
  *theirs = UniqueFd(ends[1]);
  return {};
}

Status Doorbell::open(UniqueFd end, const UniqueFd& board_file, pid_t peer, std::shared_ptr<WaitSet> waits,
                      std::unique_ptr<Doorbell>* out) {
  if (!end || !board_file || !is_pair_of(peer, end.get())) return StatusCode::kPeerRejected;
  std::shared_ptr<Mapping> board;
  if (const Status s = Mapping::open(FileRole::kBoard, board_file.get(), sizeof(Board), &board); !s.ok()) return s;
  if (board->as<const Board>()->magic != kBoardMagic || board->as<const Board>()->version != kLayoutVersion)
    return StatusCode::kPeerRejected;
  if (const Status s = waits->join(end.get()); !s.ok()) return s;
  out->reset(new Doorbell(std::move(end), std::move(board), std::move(waits)));
  return {};
}

// False: there was no memory for it; the next news rings again. A full socket is readable already, and a closed one has nobody behind it.
bool Doorbell::ring() const {
  const char byte = 0;
  while (send(end_.get(), &byte, sizeof byte, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
    if (errno != EINTR) return errno != ENOBUFS && errno != ENOMEM;
  return true;
}

}  // namespace asyncfabric::local
