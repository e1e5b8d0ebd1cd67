// messages.cc: two-sided messages: what the engine sends to engines, and the user's. Under the engine lock.
// User messages are numbered per peer and put in order at the receiver, whatever the rail does; 64 may be on the way or untaken per
// peer, so a program that does not read holds its senders back and nothing is dropped.
#include <algorithm>

#include "base/bytes.h"
#include "engine/core.h"

namespace asyncfabric {

namespace {

constexpr uint64_t kRemindNs = 50'000'000;
constexpr size_t kMostReminders = 4096;
constexpr uint64_t kNoMoreCredit = ~0ull;  // in kCredit, of a fabric that closes: its program takes no more messages

}  // namespace

void Core::send_message(Peer& peer, uint32_t lane, MessageType type, uint64_t value, std::string_view payload) {
  if (lane >= peer.lanes.size()) return;
  OutgoingMessage message;
  message.peer = peer.id;
  message.lane = lane;
  // A hello shows that its lane works, challenge and proof who is behind it, and a confirmation that nothing older is on it.
  message.any_lane = type != MessageType::kHello && type != MessageType::kChallenge && type != MessageType::kProof &&
                     type != MessageType::kReject && type != MessageType::kClosedAck;
  message.urgent = type == MessageType::kPing || type == MessageType::kPong;
  message.bytes.resize(kHeaderBytes + payload.size());
  encode_header({type, incarnation, peer.incarnation, value, peer.their_life}, message.bytes.data());
  payload.copy(message.bytes.data() + kHeaderBytes, payload.size());
  outgoing.push_back(std::move(message));
}

size_t Core::flush_outgoing() {
  size_t sent = 0;
  for (size_t left = outgoing.size(); left != 0; --left) {
    OutgoingMessage message = std::move(outgoing.front());
    outgoing.pop_front();
    Peer* peer = find_peer(message.peer);
    if (peer == nullptr || message.lane >= peer->lanes.size()) continue;
    // A heartbeat that waits for a lane which is down would declare a living peer dead.
    if (message.any_lane && !usable(peer->lanes[message.lane]))
      if (const uint32_t other = way_round(*peer, message.lane); other < peer->lanes.size()) message.lane = other;
    Lane& lane = peer->lanes[message.lane];
    if (lane.closed || !lane.handle) continue;
    WorkRequest request;
    request.kind = WorkKind::kSend;
    request.urgent = message.urgent;
    request.peer = lane.handle.get();
    request.address = message.bytes.data();
    request.length = message.bytes.size();
    const PostResult result = rails[lane.rail]->rail->post({&request, 1});
    if (result.accepted == 1)
      ++sent;
    else if (result.status.code == StatusCode::kBusy)
      outgoing.push_back(std::move(message));
  }
  return sent;
}

void Core::on_message(std::string_view bytes, Inbound inbound) {
  MessageHeader header;
  std::string_view payload;
  if (!decode_header(bytes, &header, &payload)) {
    tallies.messages_refused.add(1);
    return;
  }
  switch (header.type) {
    case MessageType::kHello: return on_hello(header, payload, inbound);
    case MessageType::kReject: return on_reject(header, payload, inbound);
    case MessageType::kRefused: return on_refused(header, payload);
    case MessageType::kChallenge: return on_challenge(header, payload, inbound);
    case MessageType::kProof: return on_proof(header, payload, inbound);
    default: break;
  }
  const auto known = peer_of_incarnation.find(header.sender);
  Peer* peer = known == peer_of_incarnation.end() ? nullptr : known->second;
  if (peer == nullptr || header.target != incarnation || (header.life != 0 && header.life != peer->life()) ||
      !belongs(*peer, inbound)) {
    tallies.messages_refused.add(1);
    return;
  }
  peer->received = true;
  peer->met = peer->met || header.life != 0;
  switch (header.type) {
    case MessageType::kWelcome: on_welcome(*peer, header, payload); break;
    case MessageType::kPing:
      if (!peer->lanes.empty())
        send_message(*peer, static_cast<uint32_t>(header.value % peer->lanes.size()), MessageType::kPong, 0, {});
      break;
    case MessageType::kUser: on_user_messages(*peer, header, payload); break;
    case MessageType::kAskCredit: on_ask_credit(*peer, header.value); break;
    case MessageType::kCredit: on_credit(*peer, header.value); break;
    case MessageType::kClosed: on_closings(*peer, header, payload); break;
    case MessageType::kClosedAck: on_closings_confirmed(*peer, header, payload); break;
    case MessageType::kAskCounters:
      if (header.value < Generations::kEnd)
        send_message(*peer, 0, MessageType::kCounters, 0,
                     generations.slice(static_cast<uint32_t>(header.value), kMaxMessageBytes));
      break;
    case MessageType::kCounters:
      if (peer->knows_a_part()) learn_generations(*peer, payload);
      break;
    case MessageType::kBye: lose_peer(*peer, StatusCode::kPeerDead, PeerState::kDisconnected); break;
    case MessageType::kAskKey: on_ask_key(*peer, header, payload); break;
    case MessageType::kKeyVerdict: on_key_verdict(*peer, header, payload); break;
    case MessageType::kRevoked: on_revoked(*peer, header, payload); break;
    default: break;  // kPong, and what was taken above
  }
}

// Whoever keeps to its credit is never more than kMessageCredits ahead: it counts what we reported as taken. What is behind next_expected was
// sent again by a sender that could not know that it came.
void Core::on_user_messages(Peer& peer, const MessageHeader& header, std::string_view payload) {
  ByteReader reader(payload);
  bool news = false;
  size_t ready = 0, refused = 0;
  const auto deliver = [&](std::string_view message) {
    news = inbox.put(peer.id, message) || news;
    ++peer.next_expected;
    ++ready;
  };
  for (uint64_t sequence = header.value; refused == 0 && !reader.done(); ++sequence) {
    const std::string_view message = reader.get_string<uint16_t>();
    if (!reader.ok() || message.size() > kMaxMessageBytes || sequence >= peer.taken_here + kMessageCredits)
      ++refused;
    else if (sequence == peer.next_expected)
      deliver(message);
    else if (sequence > peer.next_expected)
      peer.out_of_order.emplace(sequence, message);
  }
  for (auto next = peer.out_of_order.begin(); next != peer.out_of_order.end() && next->first <= peer.next_expected;
       next = peer.out_of_order.erase(next))
    if (next->first == peer.next_expected) deliver(next->second);
  tallies.messages_received.add(ready);
  tallies.messages_refused.add(refused);
  if (news) publish({.kind = CompletionKind::kMessage, .value = peer.id});
}

// A credit for each message would cost more than the message: they go out for several, and at once for a sender that waits.
void Core::credit_senders() {
  inbox.collect([this](PeerId id, uint32_t count) {
    Peer* peer = find_peer(id);
    if (peer == nullptr || peer->ended()) return;
    peer->taken_here += count;
    if (peer->wants_credit || peer->taken_here - peer->credited >= kCreditBatch) send_credit(*peer);
  });
}

void Core::send_credit(Peer& peer) {
  wants_credit(peer, false);
  peer.credited = peer.taken_here;
  send_message(peer, 0, MessageType::kCredit, peer.taken_here, {});
}

void Core::wants_credit(Peer& peer, bool wants) {
  if (peer.wants_credit != wants) inbox.add_waiting(wants ? 1 : -1);
  peer.wants_credit = wants;
}

// A credit may have been lost with a connection, so what counts is what they know.
void Core::on_ask_credit(Peer& peer, uint64_t known) {
  credit_senders();
  if (closing.load(std::memory_order_acquire))
    send_message(peer, 0, MessageType::kCredit, kNoMoreCredit, {});
  else if (known < peer.taken_here)
    send_credit(peer);
  else
    wants_credit(peer, true);
}

void Core::ask_credit(Peer& peer) {
  send_message(peer, 0, MessageType::kAskCredit, peer.taken_there, {});
  remind_later(peer);
}

void Core::on_credit(Peer& peer, uint64_t taken) {
  if (taken == kNoMoreCredit) return end_untaken(peer);
  if (taken <= peer.taken_there || taken > peer.next_sequence) return;
  peer.taken_there = taken;
  std::vector<Op*> waiting;
  waiting.swap(peer.waiting_for_credit);
  for (Op* op : waiting) start(*op);
}

// The messages that wait for room at the peer have no number yet, so the receiver misses none of them.
void Core::end_untaken(Peer& peer) {
  std::vector<Op*> waiting;
  waiting.swap(peer.waiting_for_credit);
  for (Op* op : waiting) {
    op->value = waiting.size();
    fail_op(*op, StatusCode::kNotTaken, peer.id);
  }
}

// The connection broke under a message, or may have: it has its number, so the receiver would wait for it for ever, and takes it once
// however often it comes. Who does not get it within the deadline is lost.
bool Core::send_again(Op& op, Leg& leg, Status status) {
  Peer& peer = *op.targets[leg.target].peer;
  if (op.kind != OpKind::kSend || status.code != StatusCode::kTransport || peer.state != PeerState::kConnected)
    return false;
  const uint64_t now = now_ns();
  if (op.resend_until_ns == 0) op.resend_until_ns = now + config.peer_deadline_network_ns;
  if (now >= op.resend_until_ns) {
    give_up(peer, StatusCode::kPeerDead, PeerState::kLost);
    return true;
  }
  if (leg.queued) queue_of(leg).remove(&leg);
  leg.cursor = leg.begin;
  leg.sent = {};
  op.bytes_posted.store(0, std::memory_order_relaxed);
  if (!usable(peer.lanes[leg.lane]))
    if (const uint32_t other = way_round(peer, leg.lane); other < peer.lanes.size()) leg.lane = other;
  queue_of(leg).push_back(&leg);
  return true;
}

// Engine messages have no number: those that nobody else would miss are sent again until they are answered.
void Core::remind_later(Peer& peer) {
  if (peer.next_reminder_ns != 0) return;
  peer.next_reminder_ns = now_ns() + kRemindNs;
  next_tick_ns = 0;
}

// Returns when to look again.
uint64_t Core::remind(Peer& peer, uint64_t now) {
  if (peer.next_reminder_ns == 0) return ~0ull;
  if (now < peer.next_reminder_ns) return peer.next_reminder_ns;
  peer.next_reminder_ns = 0;
  if (!peer.waiting_for_credit.empty()) {
    send_message(peer, 0, MessageType::kAskCredit, peer.taken_there, {});
    peer.next_reminder_ns = now + kRemindNs;
  }
  if (peer.knows_a_part()) {
    send_message(peer, 0, MessageType::kAskCounters, peer.generations_from, {});
    peer.next_reminder_ns = now + kRemindNs;
  }
  if (outgoing.size() > kMostReminders) {  // what was sent last has not left yet
    peer.next_reminder_ns = now + kRemindNs;
    return peer.next_reminder_ns;
  }
  if (!peer.closings_asked.empty()) {
    peer.closings_asked.send_again(
        [&](uint64_t number, const Closings& closings) { send_closings(peer, number, closings); });
    peer.next_reminder_ns = now + kRemindNs;
  }
  return peer.next_reminder_ns != 0 ? peer.next_reminder_ns : ~0ull;
}

}  // namespace asyncfabric
