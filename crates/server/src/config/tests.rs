use std::num::{NonZeroU16, NonZeroU64};

use vmstrata_disk::{DetectZeroes, Format};
use vmstrata_store::CacheMode;
use vmstrata_tier::{DurableAt, OnMissing, OnOutage};

use super::*;

fn parse(text: &str) -> Result<Settings, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vmstrata.toml");
    std::fs::write(&path, text).unwrap();
    Settings::read(&path).map(|mut settings| {
        // What was relative is seen from the file's directory.
        settings.disks.iter_mut().for_each(|disk| {
            disk.path = disk.path.strip_prefix(dir.path()).unwrap_or(&disk.path).to_owned();
        });
        settings
    })
}

fn nbd(address: &str) -> NbdSpec {
    vmstrata_api::NbdSpec { address: address.to_owned(), ..Default::default() }.try_into().unwrap()
}

#[test]
fn every_key_is_read() {
    let settings = parse(
        r#"
        nbd = ["unix:/run/nbd.sock", { address = "tcp:[::1]:7", allow = [{ client = "CN=ci", rw = true, disks = ["web"] }] }]
        nbd-owner = "operator"
        nbd-group = "backup"
        nbd-mode = "620"
        nbd-tls-cert = "/pki/cert.pem"
        nbd-tls-key = "/pki/key.pem"
        nbd-tls-client-ca = "/pki/ca.pem"
        allow-backing = ["/srv/golden"]
        metadata-cache = "256M"
        max-open-files = 100
        workers = 3
        tier-cache = "20G"
        tier-rate = "40M"
        move-rate = "50M"
        keep-going = true
        runtime-dir = "/run/vms"
        control = "/run/vms/c.sock"
        metrics = 9100
        audit = "/var/log/vmstrata/audit"
        log-format = "json"

        [[disk]]
        path = "web.qcow2"
        keep = "daily=7,weekly=4"

        [[disk]]
        path = "/abs/db.img"
        name = "db"
        read-only = true
        cache = "direct"
        detect-zeroes = "unmap"
        subclusters = "off"
        format = "raw"

        [disk.limits]
        iops-total = { rate = 1000 }
        bps-write = { rate = 20_971_520, max = 104_857_600, max-length = 60 }

        [[vhost-user]]
        disk = "web"
        socket = "/run/web.sock"
        queues = 4
        threads = 2
        poll-us = 50
        serial = "WEB-1"
        share = true
        owner = "qemu"
        group = "guests"
        mode = "660"
        "#,
    )
    .unwrap();
    let [web, db] = &settings.disks[..] else { panic!("{settings:?}") };
    assert_eq!((web.name.as_str(), web.path.as_path()), ("web", Path::new("web.qcow2")));
    assert_eq!(web.keep.as_ref().map(ToString::to_string).as_deref(), Some("daily=7,weekly=4"));
    assert_eq!((db.name.as_str(), db.path.as_path(), db.read_only), ("db", Path::new("/abs/db.img"), true));
    assert_eq!((db.cache, db.format), (CacheMode::Direct, Some(Format::Raw)));
    let shown = |disk: &DiskSpec| vmstrata_api::DiskSpec::from(disk).limits.to_string();
    assert_eq!(shown(web), "");
    let limits = "iops-total=1000,bps-write=20971520,bps-write-max=104857600,bps-write-max-length=60";
    assert_eq!(shown(db), limits);
    assert_eq!((web.detect_zeroes, db.detect_zeroes), (DetectZeroes::Off, DetectZeroes::Unmap));
    assert_eq!((web.subclusters, db.subclusters), (true, false));
    let socket = &settings.vhost_user[0];
    assert_eq!((socket.queues, socket.poll_us, socket.share), (NonZeroU16::new(4), Some(50), true));
    let access = |owner: &str, group: &str, mode| SocketAccess {
        owner: Some(owner.into()),
        group: Some(group.into()),
        mode: Some(mode),
    };
    assert_eq!(socket.access, access("qemu", "guests", 0o660));
    assert_eq!(settings.nbd_access, access("operator", "backup", 0o620));
    let [readers, some] = &settings.nbd[..] else { panic!("{settings:?}") };
    assert_eq!((readers.rw, &some.address), (false, &"tcp:[::1]:7".parse().unwrap()));
    assert_eq!(
        (some.allow[0].client.as_str(), some.allow[0].rw, some.allow[0].disks.len()),
        ("CN=ci", true, 1)
    );
    assert_eq!(settings.nbd_tls.as_ref().unwrap().client_ca.as_deref(), Some(Path::new("/pki/ca.pem")));
    assert_eq!(settings.control, Some(ControlPlace::At("/run/vms/c.sock".into())));
    assert_eq!(settings.metrics, Some("127.0.0.1:9100".parse().unwrap()));
    assert_eq!(settings.log_format, Some(LogFormat::Json));
    let options = settings.into_options();
    assert_eq!(options.audit.as_deref(), Some(Path::new("/var/log/vmstrata/audit")));
    assert!(options.keep_going);
    assert_eq!(options.limits.metadata_cache_bytes, 256 << 20);
    assert_eq!((options.limits.max_open_files, options.limits.workers), (Some(100), Some(3)));
    assert_eq!(options.limits.tier_cache_bytes, Some(20 << 30));
    assert_eq!(options.limits.tier_rate, NonZeroU64::new(40 << 20));
    assert_eq!(options.limits.move_rate, NonZeroU64::new(50 << 20));
    assert_eq!(options.allow_backing, [Path::new("/srv/golden")]);
}

#[test]
fn every_key_of_a_tiered_disk_is_read() {
    let text = r#"
        [[disk]]
        path = "/nas/mail.qcow2"
        tier = "tier"
        window = 10
        epochs = "1h"
        on-missing = "error:20"
        on-outage = "stall"
        outage-bytes = 1073741824
        durability = "repository"
    "#;
    let far = parse(&text.replace("window = 10", "repository = \"hdfs://namenode/vms/web\"")).unwrap();
    let far = far.disks[0].tier.as_ref().unwrap().repository.as_ref().unwrap().to_string();
    assert_eq!(far, "hdfs://namenode/vms/web");
    let settings = parse(text).unwrap();
    let tier = settings.disks[0].tier.as_ref().unwrap();
    assert!(tier.dir.is_absolute() && tier.dir.ends_with("tier"));
    assert_eq!(tier.window, Some(Duration::from_secs(10)));
    assert_eq!(tier.epochs, Some(Duration::from_secs(3600)));
    assert_eq!(tier.on_missing, OnMissing::Error(Duration::from_secs(20)));
    assert_eq!((tier.on_outage, tier.outage_bytes), (OnOutage::Stall, NonZeroU64::new(1 << 30)));
    assert_eq!(tier.durability, DurableAt::Repository);
}

#[test]
fn an_empty_file_leaves_everything_to_the_defaults() {
    assert_eq!(parse("").unwrap(), Settings::default());
    let options = parse("# nothing\n").unwrap().into_options();
    assert_eq!(options.limits, Limits::default());
    assert_eq!(options.control, ControlPlace::InRuntimeDir);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    for (text, line, part) in [
        ("nbd = [\n\"unix:a\",\n\"/b\"\n]", 3, "'/b' is no NBD address"),
        ("nbd = [\n{ address = \"unix:a\", rx = true }]", 2, "unknown field `rx`"),
        ("nbd = [{ address = \"unix:a\", allow = [{ client = \"a\" }] }]", 1, "'a' names no client"),
        ("nbd = [7]", 1, "an address, or a table"),
        ("metrics = \"0.0.0.0:9100\"", 1, "say 0.0.0.0:9100,insecure"),
        ("\nworkers = 0", 2, "workers is 1 to 1024, not 0"),
        ("max-open-files = 15", 1, "at least 16, not 15"),
        ("\n\nreadonly = true", 3, "unknown field `readonly`"),
        ("[[disk]]\npath = \"a\"\nkeep = \"7\"", 1, "'7' is no rule"),
        ("[[disk]]\npath = \"a\"\nreadonly = true", 3, "unknown field `readonly`"),
        ("\n[[disk]]\nname = \"a\"", 2, "missing field `path`"),
        ("\n[[disk]]\npath = \"a\"\nname = \"b=c\"", 2, "no '='"),
        ("[[disk]]\npath = \"a\"\ncache = \"none\"", 3, "unknown variant `none`"),
        ("\n[[vhost-user]]\ndisk = \"a\"\nsocket = \"s\"\nqueues = 0", 2, "'queues' is at least 1"),
        ("\nnbd-mode = \"rw\"", 2, "octal digits up to 666"),
        ("\nnbd-group = \"\"", 2, "a name or a number"),
        ("\n[[vhost-user]]\ndisk = \"a\"\nsocket = \"s\"\nmode = \"888\"", 2, "octal digits up to 666"),
        ("metadata-cache = \"1.5G\"", 1, "1536M"),
        ("metrics = \"localhost\"", 1, "as in 9100"),
        ("\nnbd-tls-cert = \"c\"", 2, "go together"),
        ("nbd-tls-client-ca = \"c\"", 1, "go together"),
        ("no-control = true\ncontrol = \"c\"", 2, "either control or no-control"),
        ("a = ", 1, ""),
        ("workers = \"many\"", 1, "invalid type"),
        ("disk = 3", 1, "invalid type"),
        ("\ncontrol = \"\"", 2, "a path is not empty"),
        ("workers = 2\nallow-backing = [\n\"/srv\", \"\"]", 2, "a path is not empty"),
        ("[[vhost-user]]\ndisk = \"a\"\nsocket = \"\"", 1, "a socket needs a path"),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.line, line, "{text:?}: {error}");
        let said = error.to_string();
        assert!(said.contains(part) && said.contains(&format!("vmstrata.toml:{line}: ")), "{text:?}: {said}");
        assert!(!said.contains('\n'), "{said}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Settings::read(Path::new("/absent/vmstrata.toml")).unwrap_err().to_string();
    assert!(error.contains("/absent/vmstrata.toml") && error.contains("No such file"), "{error}");
}

#[test]
fn flags_win_and_a_list_replaces_a_list() {
    let file = parse("workers = 3\nmetadata-cache = \"1M\"\nnbd = [\"unix:/a\", \"unix:/b\"]").unwrap();
    let flags = Settings {
        workers: Some(5),
        nbd: vec![nbd("unix:/c")],
        control: Some(ControlPlace::Off),
        ..Settings::default()
    };
    let both = flags.over(file);
    assert_eq!((both.workers, both.metadata_cache_bytes), (Some(5), Some(1 << 20)));
    assert_eq!(both.nbd, [nbd("unix:/c")]);
    assert_eq!(both.control, Some(ControlPlace::Off));
}
