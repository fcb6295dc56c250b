/* What the parts of the agent share. */
#ifndef AENV_AGENT_H
#define AENV_AGENT_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

enum { HEAD = 5, PIECE = 64 * 1024 };
enum stage { BAD = 'b', START = 's', DIRECTORY = 'd', PROGRAM = 'p', FILES = 'g' }; /* what failed */
enum phase { SETUP, RUNNING, LINGERING, GONE };
enum kind { COMMAND, READ, WRITE };

struct text {
    char *data;
    size_t length;
};

struct client {
    int socket, input, status, outputs[2];
    enum phase phase;
    enum kind kind;
    pid_t pid;
    bool ready, exited, timed_out, sweeping, terminal, no_input, has_mode, stuck;
    int wait_status, failure;
    enum stage failed_at;
    mode_t mode;
    volatile bool *whole; /* shared with the child that writes a file: whether its input ended, or only broke off */
    struct winsize window;
    struct text arguments, variables, directory;
    struct rlimit files; /* that the command may have open, whatever the agent may */
    int64_t allowed, deadline, ended_at, sweep_at, sweep_until;
    ssize_t last[2];
    struct pollfd *polled, *polled_end;
    size_t in_start, in_end, sent_of_frame, out_start, out_end;
    int turn;
    char in[HEAD + PIECE], out[HEAD + PIECE];
};

struct record { /* what a child tells before it becomes the command, or while it moves a file */
    char what;  /* 'z' a size, or the stage that failed */
    uint64_t value;
};

/* processes.c: kill what is in the session of ``leader`` or descends from it; how many of them were alive. */
int hunt(pid_t leader);

/* child.c: the two ends of a command's streams; and what the child does with its own, which it tells ``status``. */
bool open_terminal(struct client *client, int *ours, int *theirs);
bool open_pipes(struct client *client, int *ours, int *theirs);
_Noreturn void live(struct client *client, char **arguments, const int *ends, int status);

#endif
