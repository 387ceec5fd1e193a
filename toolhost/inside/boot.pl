# The boot stage of confine.py for a jail that becomes another program at once: it starts in a millisecond, where Python
# takes ten. The host takes it where there is a Perl in /usr and no root to drop (toolhost/policy/plan.py).
#
# The plan comes on descriptor 8: words, each followed by a zero byte. Source: docs/design/sandbox.md sections 3.5, 9.

my ($FAILED, $REPLACED) = (125, 124);    # system.py
my ($O_PATH, $S_IFMT, $S_IFDIR) = (010000000, 0170000, 0040000);
my $FOR_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15;    # confine.py
my ($CREATE_RULESET, $ADD_RULE, $RESTRICT_SELF) = (444, 445, 446);

sub fail { my ($why, $status) = @_; syswrite STDERR, "boot: $why\n"; exit($status || $FAILED) }

open(my $plan, '<&=', 8) or fail("no plan: $!");
my @words = split /\0/, do { local $/; <$plan> }, -1;
close $plan;
pop @words;    # behind the last zero byte
my $PRLIMIT = shift @words;
my (%seen, $ruleset);

sub check {
    my ($path, @found) = @_;
    my ($device, $inode) = @{ $seen{$path} };
    fail("$path was replaced while the jail was being made", $REPLACED) if $found[0] != $device || $found[1] != $inode;
}

while (defined(my $what = shift @words)) {
    if ($what eq 'seen') {
        my ($path, $device, $inode) = splice @words, 0, 3;
        $seen{$path} = [$device + 0, $inode + 0];
        my @found = lstat $path or fail("$path: $!");
        check($path, @found);
    } elsif ($what eq 'limit') {
        my ($number, $value) = splice @words, 0, 2;
        my $both = pack 'QQ', $value, $value;
        # EPERM: it would have been raised, and what is lower stays.
        syscall($PRLIMIT + 0, 0, $number + 0, $both, 0) == 0 or $! == 1 or fail("prlimit64: $!");
    } elsif ($what eq 'ruleset') {
        my $attributes = pack 'QQQ', splice @words, 0, 3;
        $ruleset = syscall($CREATE_RULESET, $attributes, length $attributes, 0);
        fail("landlock_create_ruleset: $!") if $ruleset < 0;
    } elsif ($what eq 'rule') {
        my ($path, $rights) = splice @words, 0, 2;
        sysopen(my $place, $path, $O_PATH) or ($! == 2 ? next : fail("$path: $!"));
        my @found = stat $place or fail("$path: $!");
        check($path, @found) if exists $seen{$path};
        $rights = $rights + 0 & $FOR_FILES if ($found[2] & $S_IFMT) != $S_IFDIR;
        my $rule = pack 'Ql', $rights, fileno $place;
        syscall($ADD_RULE, $ruleset, 1, $rule, 0) == 0 or fail("landlock_add_rule: $path: $!");
    } elsif ($what eq 'restrict') {
        syscall($RESTRICT_SELF, $ruleset, 0) == 0 or fail("landlock_restrict_self: $!");
    } elsif ($what eq 'exec') {
        exec { $words[0] } @words or fail("$words[0]: $!");
    } else {
        fail("the plan says $what");
    }
}
fail('the plan ends without a program');
