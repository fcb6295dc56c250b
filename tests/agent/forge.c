/* A command that tries to end the first process of its container with a signal that looks as if from outside. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static long claim(int signal, int code) {
    siginfo_t told = {.si_signo = signal, .si_code = code}; /* of process 0, as who is outside */
    return syscall(SYS_rt_sigqueueinfo, 1, signal, &told);
}

static void every_code(void) {
    for (int code = -70; code < 200; code++)
        for (int n = 0; n < 2; n++) claim(n ? SIGINT : SIGTERM, code);
}

static void by_the_kernel(void) {
    int ends[2];
    if (pipe(ends) != 0 || fcntl(ends[0], F_SETOWN, 1) != 0 || fcntl(ends[0], F_SETSIG, SIGTERM) != 0 ||
        fcntl(ends[0], F_SETFL, O_ASYNC) != 0 || write(ends[1], "x", 1) != 1)
        perror("pipe");
}

static void without_room(void) {
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &held, NULL);
    for (int n = 0; n < 200000 && sigqueue(getpid(), SIGRTMIN, (union sigval){0}) == 0;) n++;
    claim(SIGTERM, SI_QUEUE);
}

int main(int count, char **arguments) {
    const char *how = count > 1 ? arguments[1] : "";
    if (strcmp(how, "code") == 0) every_code();
    if (strcmp(how, "kernel") == 0) by_the_kernel();
    if (strcmp(how, "room") == 0) without_room();
    puts("tried");
    return 0;
}
