// Replays, in SimGrid's SMPI, what the ranks of a job do in one average. The plan is a file with a step in each line:
//
//   delay SECONDS           every rank computes
//   doubling BYTES          an allreduce of all ranks by recursive doubling: one array of this size in each message
//   allreduce LEADERS BYTES an allreduce among the nodes, of as many ranks of each node, each with an array of this size
//   meet                    a barrier within each node
//
// smpirun ... replay PLAN RANKS: the number of ranks on each host; ranks are numbered host by host.
//
// It prints the seconds until the last rank has finished.
//
// SMPI does not copy data nor add it up while it replays, so memory is needed for one array only.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <simgrid/s4u.hpp>
#include <smpi/smpi.h>

namespace {

// SMPI runs all ranks in one process; they share these.
double last_end = 0;
std::vector<char> room[2];

void make_room(size_t bytes) {
  for (auto& each : room)
    each.resize(std::max(each.size(), bytes));
}

// MPICH's allreduce by recursive doubling (Thakur, Rabenseifner and Gropp, 2005, section 4.5).
void doubling(MPI_Comm comm, int bytes) {
  int rank, size, most = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  while (2 * most <= size)
    most *= 2;
  const int beyond = size - most;
  make_room(bytes);
  auto send = [&](int to) { MPI_Send(room[0].data(), bytes, MPI_BYTE, to, 0, comm); };
  auto receive = [&](int from) { MPI_Recv(room[1].data(), bytes, MPI_BYTE, from, 0, comm, MPI_STATUS_IGNORE); };
  if (rank < 2 * beyond && rank % 2 == 0) {
    send(rank + 1);
    receive(rank + 1);
    return;
  }
  if (rank < 2 * beyond)
    receive(rank - 1);
  const int place = rank < 2 * beyond ? rank / 2 : rank - beyond;
  for (int mask = 1; mask < most; mask *= 2) {
    const int other = place ^ mask, to = other < beyond ? 2 * other + 1 : other + beyond;
    MPI_Sendrecv(room[0].data(), bytes, MPI_BYTE, to, 0, room[1].data(), bytes, MPI_BYTE, to, 0, comm,
                 MPI_STATUS_IGNORE);
  }
  if (rank < 2 * beyond)
    send(rank - 1);
}

// MPICH chooses by the number of elements, and SMPI by the number of bytes.
void allreduce(MPI_Comm comm, double bytes) {
  int size, most = 1;
  MPI_Comm_size(comm, &size);
  while (2 * most <= size)
    most *= 2;
  const int count = static_cast<int>(bytes / 4);
  if (count < most)
    return doubling(comm, 4 * count);
  make_room(bytes);
  MPI_Allreduce(room[0].data(), room[1].data(), count, MPI_FLOAT, MPI_SUM, comm);
}

} // namespace

int main(int argc, char* argv[]) {
  MPI_Init(&argc, &argv);
  if (argc != 3) {
    std::fprintf(stderr, "expected a plan and the number of ranks on each host, got %d arguments\n", argc - 1);
    return 1;
  }
  const int on_host = std::stoi(argv[2]);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm within = MPI_COMM_SELF, across = MPI_COMM_WORLD;
  if (on_host > 1) {
    MPI_Comm_split(MPI_COMM_WORLD, rank / on_host, rank, &within);
    MPI_Comm_split(MPI_COMM_WORLD, rank % on_host, rank, &across);
  }
  // From now on, no data is copied; a communicator could not be split any more.
  const auto* self = simgrid::s4u::Actor::self();
  smpi_replay_init(self->get_property("instance_id"), rank, 0);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  std::ifstream plan(argv[1]);
  for (std::string line; std::getline(plan, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "delay") {
      double seconds;
      words >> seconds;
      simgrid::s4u::this_actor::sleep_for(seconds);
    } else if (what == "doubling") {
      int nbytes;
      words >> nbytes;
      doubling(MPI_COMM_WORLD, nbytes);
    } else if (what == "allreduce") {
      int leaders;
      double bytes;
      words >> leaders >> bytes;
      if (rank % on_host < leaders)
        allreduce(across, bytes);
    } else if (what == "meet" && on_host > 1) {
      MPI_Barrier(within);
    }
  }
  last_end = std::max(last_end, MPI_Wtime() - begin);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    std::printf("{\"seconds\": %.9g}\n", last_end);
  MPI_Finalize();
  return 0;
}
