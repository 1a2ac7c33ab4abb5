//! Runs of the simulator itself, each a process of its own: it needs a process with one thread.

use std::process::Command;

/// Runs seeds; what was printed, and whether all held.
fn run(arguments: &[&str]) -> (String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_vmstrata-sim")).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (text, output.status.success())
}

#[test]
fn a_seed_replays_bit_for_bit() {
    let (text, holds) = run(&["--seeds", "30", "--seed", "5000", "--twice"]);
    assert!(holds, "{text}");
}

#[test]
fn seeds_hold() {
    let (text, holds) = run(&["--seeds", "200"]);
    assert!(holds, "{text}");
}

/// The seeds before the one that finds the fault hold without it, as those of `seeds_hold` do.
fn finds(fault: &str) {
    let (text, holds) = run(&["--seeds", "1000", "--plant", fault]);
    assert!(!holds && text.starts_with("seed "), "{text}");
}

#[test]
fn a_missing_flush_is_found() {
    finds("MissingFlush");
}

#[test]
fn tables_that_are_written_before_data_are_found() {
    finds("SwappedFlush");
}

#[test]
fn a_lost_lock_is_found() {
    finds("LostLock");
}

#[test]
fn a_stale_page_of_the_map_is_found() {
    finds("StalePage");
}

#[test]
fn a_doubled_write_is_found() {
    finds("DoubledWrite");
}

#[test]
fn a_move_seed_replays_bit_for_bit() {
    let (text, holds) = run(&["--run", "move", "--seeds", "15", "--seed", "5000", "--twice"]);
    assert!(holds, "{text}");
}

#[test]
fn move_seeds_hold() {
    let (text, holds) = run(&["--run", "move", "--seeds", "100"]);
    assert!(holds, "{text}");
}

/// As [`finds`], with a fault of a move.
fn move_finds(fault: &str) {
    let (text, holds) = run(&["--run", "move", "--seeds", "2000", "--plant", fault]);
    assert!(!holds && text.starts_with("seed "), "{text}");
}

#[test]
fn a_copy_that_is_not_flushed_is_found() {
    move_finds("UnflushedCopy");
}

#[test]
fn an_old_path_that_comes_back_is_found() {
    move_finds("LateRemoval");
}

#[test]
fn a_disk_that_is_taken_for_whole_too_soon_is_found() {
    move_finds("HastyWhole");
}

#[test]
fn a_repository_seed_replays_bit_for_bit() {
    let (text, holds) = run(&["--run", "repository", "--seeds", "20", "--seed", "5000", "--twice"]);
    assert!(holds, "{text}");
}

#[test]
fn repository_seeds_hold() {
    let (text, holds) = run(&["--run", "repository", "--seeds", "100"]);
    assert!(holds, "{text}");
}

/// That messages are late, too, `a_layer_that_was_not_finished_is_found` shows.
#[test]
fn repository_seeds_meet_a_bad_network() {
    let (text, holds) = run(&["--run", "repository", "--seeds", "10", "--verbose"]);
    assert!(holds, "{text}");
    for kind in ["Lost", "Partition"] {
        assert!(text.contains(&format!("kind: {kind}")), "no {kind}");
    }
}

/// As [`finds`], with a fault of a host or of the repository's server.
fn repository_finds(fault: &str) {
    let (text, holds) = run(&["--run", "repository", "--seeds", "1000", "--plant", fault]);
    assert!(!holds && text.starts_with("seed "), "{text}");
}

#[test]
fn a_create_that_overwrites_is_found() {
    repository_finds("Overwrite");
}

#[test]
fn a_half_object_is_found() {
    repository_finds("HalfObject");
}

#[test]
fn a_process_that_publishes_after_a_take_over_is_found() {
    repository_finds("Unfenced");
}

#[test]
fn a_take_over_that_misses_an_epoch_is_found() {
    repository_finds("BlindClaim");
}

#[test]
fn a_layer_that_is_not_read_back_is_found() {
    repository_finds("Unverified");
}

#[test]
fn a_layer_that_was_not_finished_is_found() {
    repository_finds("TrustedFinish");
}

#[test]
fn a_head_that_counts_because_it_could_be_created_is_found() {
    repository_finds("TrustedCreate");
}

#[test]
fn a_head_that_is_deleted_too_soon_is_found() {
    repository_finds("Hasty");
}

#[test]
fn a_layer_that_is_deleted_before_its_head_came_is_found() {
    repository_finds("LateListing");
}

#[test]
fn a_delete_of_a_pinned_layer_is_found() {
    repository_finds("UnreadPins");
}

#[test]
fn a_pin_that_was_made_too_late_is_found() {
    repository_finds("UnseenPin");
}

#[test]
fn a_merge_that_loses_an_epoch_is_found() {
    repository_finds("Unmerged");
}

#[test]
fn a_mount_seed_replays_bit_for_bit() {
    let (text, holds) = run(&["--run", "mount", "--seeds", "20", "--seed", "5000", "--twice"]);
    assert!(holds, "{text}");
}

/// Each with some hundred states that a NAS would have left.
#[test]
fn mount_seeds_hold() {
    let (text, holds) = run(&["--run", "mount", "--seeds", "60"]);
    assert!(holds && text.contains(" crash states"), "{text}");
}

/// That names and listings are old, `a_layer_that_an_old_listing_lacks_and_is_taken_for_lost_is_found` shows.
#[test]
fn mount_seeds_meet_a_bad_mount() {
    let (text, holds) = run(&["--run", "mount", "--seeds", "20", "--verbose"]);
    assert!(holds, "{text}");
    let (is_stale, is_taken) = (format!("result: -{}", libc::ESTALE), format!("result: -{}", libc::EEXIST));
    for met in ["kind: Lost", "kind: Partition", "the NAS starts anew", ".nfs", &is_stale, &is_taken] {
        assert!(text.contains(met), "no {met}");
    }
}

/// As [`finds`], with a fault of a host, of its mount or of the NAS.
fn mount_finds(fault: &str) {
    let (text, holds) = run(&["--run", "mount", "--seeds", "1000", "--plant", fault]);
    assert!(!holds && text.starts_with("seed "), "{text}");
}

/// As [`mount_finds`], among many seeds.
fn rarely_finds(fault: &str) {
    let (text, holds) = run(&["--run", "mount", "--seeds", "10000", "--plant", fault]);
    assert!(!holds && text.starts_with("seed "), "{text}");
}

#[test]
fn a_link_that_overwrites_is_found() {
    mount_finds("Overwrite");
}

#[test]
fn bytes_that_are_not_flushed_are_found() {
    mount_finds("Uncommitted");
}

#[test]
fn names_that_are_not_flushed_are_found() {
    mount_finds("Unflushed");
}

#[test]
fn a_layer_that_is_read_back_from_memory_is_found() {
    mount_finds("KeptPages");
}

#[test]
fn a_process_that_publishes_after_a_take_over_of_a_mount_is_found() {
    mount_finds("Unfenced");
}

#[test]
#[ignore = "one seed in thousands finds it, another after each change of the product"]
fn a_head_that_counts_before_its_name_is_flushed_is_found() {
    rarely_finds("SeenHead");
}

#[test]
#[ignore = "one seed in thousands finds it, another after each change of the product"]
fn a_layer_that_an_old_listing_lacks_and_is_taken_for_lost_is_found() {
    rarely_finds("StaleLoss");
}

#[test]
fn a_damaged_state_that_is_taken_over_is_found() {
    mount_finds("BlindFallback");
}
