// incoming.cc: the half of the exchange that answers: the other ends of connections that peers open. Service thread.
#include <algorithm>
#include <cerrno>

#include "providers/verbs/peers/exchange.h"

namespace asyncfabric::verbs {
namespace {

constexpr size_t kMostShutOut = 4096;

}  // namespace

void Exchange::take_datagram(std::string_view bytes) {
  Datagram datagram;
  if (!parse(bytes, &datagram)) return;
  switch (datagram.kind) {
    case DatagramKind::kRequest: take_request(datagram); break;
    case DatagramKind::kBye: take_bye(datagram); break;
    case DatagramKind::kAskKey: answer_key(datagram); break;
    case DatagramKind::kReply:
    case DatagramKind::kRefusal:
    case DatagramKind::kByeReply:
      if (datagram.target == address_.incarnation) take_reply(datagram);
      break;
    case DatagramKind::kMoved:
      if (datagram.target == address_.incarnation) take_moved(datagram);
      break;
    case DatagramKind::kKey:
      if (datagram.target == address_.incarnation) take_number(datagram);
      break;
  }
}

void Exchange::take_request(const Datagram& request) {
  Datagram reply;
  reply.kind = DatagramKind::kReply;
  reply.connection = request.connection;
  reply.attempt = request.attempt;
  reply.lanes = request.lanes;
  const bool gone = request.target != address_.incarnation ||
                    std::find(shut_out_.begin(), shut_out_.end(), request.connection) != shut_out_.end();
  if (gone || request.sender.ethernet != address_.ethernet) {
    reply.kind = DatagramKind::kRefusal;
    reply.code = gone ? ESTALE : EPROTO;
    post(request.sender, reply);
    return;
  }
  if (request.lanes == 0) return;
  auto found = incoming_.find(request.connection);
  if (found == incoming_.end()) {
    if (incoming_.size() >= kMaxPeers) {
      reply.kind = DatagramKind::kRefusal;
      reply.code = ENOSPC;
      post(request.sender, reply);
      return;
    }
    found = incoming_.emplace(request.connection, Incoming{}).first;
  }
  Incoming& in = found->second;
  if (request.attempt < in.attempt) return;  // late: a newer one was answered already
  if (request.attempt > in.attempt) {
    in.sender = request.sender;
    moved_.erase(request.connection);
    const Status status = answer(in, request, &reply);
    if (!status.ok()) {
      reply.kind = DatagramKind::kRefusal;
      reply.code = static_cast<uint16_t>(status.raw != 0 ? status.raw : EIO);
    }
    in.attempt = request.attempt;
    reply.target = request.sender.incarnation;
    reply.sender = address_;
    in.answer = encode(reply);
  }
  (void)box_->send(request.sender, in.answer);
}

Status Exchange::answer(Incoming& in, const Datagram& request, Datagram* reply) {
  const Receives& receives = *queues_->receives;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((request.lanes >> lane & 1) == 0) continue;
    forget(std::exchange(in.pairs[lane], {}));
    QueuePair& pair = in.pairs[lane];
    const bool signals = lane == kSignalLane;
    Status status = make_queue_pair(device_, queues_->cq.get(), signals ? receives.messages() : receives.counts(),
                                    {signals ? kCreditSends : 1, 0, 0}, &pair);
    if (status.ok()) status = ready_to_receive(device_, pair, request.sender, request.ends[lane]);
    if (status.ok() && signals) status = ready_to_send(device_, pair);
    if (!status.ok()) {
      pair = {};
      return status;
    }
    reply->ends[lane] = {pair.qp->qp_num, pair.psn};
    // Before the answer leaves: the lock's holder knows whose it is before anything comes.
    News news;
    news.kind = NewsKind::kIncoming;
    news.qp = pair.qp.get();
    news.qpn = pair.qp->qp_num;
    news.id = request.connection;
    if (!signals) {
      handover_->post(std::move(news));
      continue;
    }
    if (!in.has_window && free_windows_ != 0) {
      --free_windows_;
      in.has_window = true;
    } else if (!in.has_window && windows_ < kMaxWindows) {
      News room;
      room.kind = NewsKind::kReceives;
      if (ReceiveBlock::make(device_, kWindow, &room.block).ok()) {
        handover_->post(std::move(room));
        ++windows_;
        in.has_window = true;
      }
    }
    news.credits = in.has_window ? kWindow : 1;
    reply->credits = static_cast<uint16_t>(news.credits);
    handover_->post(std::move(news));
  }
  return {};
}

// The lock's holder may be about to give credits through it, or to read what it brought: it goes when the lock's holder has answered.
void Exchange::forget(QueuePair pair) {
  if (!pair.qp) return;
  News news;
  news.kind = NewsKind::kIncomingGone;
  news.qpn = pair.qp->qp_num;
  const uint32_t qpn = news.qpn;
  retiring_[qpn] = std::move(pair);
  handover_->post(std::move(news));
}

void Exchange::take_bye(const Datagram& bye) {
  Datagram reply;
  reply.kind = DatagramKind::kByeReply;
  reply.connection = bye.connection;
  if (bye.target == address_.incarnation) end_incoming(bye.connection);
  post(bye.sender, reply);
}

void Exchange::end_incoming(uint64_t connection) {
  moved_.erase(connection);
  const auto found = incoming_.find(connection);
  if (found == incoming_.end()) return;
  if (found->second.has_window) ++free_windows_;
  for (QueuePair& pair : found->second.pairs) forget(std::move(pair));
  incoming_.erase(found);
}

// Its sender may live, and would build it again as a lane that broke: it is refused, and begins anew with another connection.
void Exchange::shut_out(uint64_t connection) {
  end_incoming(connection);
  shut_out_.push_back(connection);
  if (shut_out_.size() > kMostShutOut) shut_out_.pop_front();
}

// Whoever names the key was given it, and may know its number as well.
void Exchange::answer_key(const Datagram& question) {
  if (question.target != address_.incarnation) return;
  Datagram reply;
  reply.kind = DatagramKind::kKey;
  reply.connection = question.connection;
  reply.key = question.key;
  reply.code = registry_->find(question.key, &reply.number) ? 1 : 0;
  post(question.sender, reply);
}

}  // namespace asyncfabric::verbs
