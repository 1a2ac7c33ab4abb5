//! How `--disk`, `--vhost-user`, `--nbd` and `--fuse` are written; what they may say is checked by the server's own rules.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use vmstrata_api as api;
use vmstrata_disk::Format;
use vmstrata_server::size::parse_size;
use vmstrata_server::spec::{DiskSpec, FuseSpec, NbdSpec, VhostUserSpec};
use vmstrata_types::path_to_text;

use crate::key_values::KeyValues;

/// Reads `--format` and its like: the formats a layer can have, by the names qemu-img knows.
pub fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"]).map(|name| match name.as_str() {
        "raw" => Format::Raw,
        _ => Format::Qcow2,
    })
}

/// The format of an image by its name: qcow2, unless that ends in .raw or .img.
pub fn format_by_name(image: &Path) -> Format {
    let is_raw = image.extension().is_some_and(|suffix| suffix == "raw" || suffix == "img");
    if is_raw { Format::Raw } else { Format::Qcow2 }
}

/// Reads `path=FILE[,name=NAME][,read-only][,force][,cache=host|direct][,detect-zeroes=off|on|unmap][,subclusters=on|off][,format=qcow2|raw]
/// [,at=SNAPSHOT[,clone=FILE]][,agent=SOCKET][,keep=RULE,,RULE...][,backing=none|PATH[:PATH...]][,tier=DIR[,repository=ADDRESS][,group=NAME][,window=SECONDS][,epochs=TIME]
/// [,on-missing=wait|error[:SECONDS]][,on-outage=continue|stall][,outage-bytes=SIZE][,durability=host|repository][,standby]][,replica=DIR[,repository=ADDRESS][,on-missing=...]][,role=swap|local,size=SIZE][,LIMITS]`.
///
/// # Errors
/// Names the key that is missing, unknown, repeated or malformed.
pub fn parse_disk(text: impl AsRef<OsStr>) -> Result<DiskSpec> {
    Ok(parse_api_disk(text)?.try_into()?)
}

/// The same in words that more can be said of.
///
/// # Errors
/// As [`parse_disk`].
pub fn parse_disk_to_serve(text: OsString) -> Result<api::DiskSpec> {
    parse_disk(&text)?;
    parse_api_disk(text)
}

/// The same, as a running server is asked for it.
///
/// # Errors
/// As [`parse_disk`], but for what only the server checks.
pub fn parse_api_disk(text: impl AsRef<OsStr>) -> Result<api::DiskSpec> {
    let mut list = KeyValues::parse(text.as_ref())?;
    let backing = list.take("backing")?.map(|paths| match paths.as_bytes() {
        b"none" => Vec::new(),
        paths => paths
            .split(|byte| *byte == b':')
            .map(|path| path_to_text(Path::new(OsStr::from_bytes(path))))
            .collect(),
    });
    let limits = take_limits(&mut list)?;
    let (outage_bytes, size_bytes) = (take_size(&mut list, "outage-bytes")?, take_size(&mut list, "size")?);
    Ok(api::DiskSpec { backing, limits, outage_bytes, size_bytes, ..list.read()? })
}

/// Reads limits: `iops-total=N`, `bps-read=SIZE` and their like, with `-max` and `-max-length`; or `none`.
///
/// # Errors
/// Names the key that is unknown, repeated or malformed.
pub fn parse_limits(text: &str) -> Result<api::DiskLimits> {
    if text == "none" {
        return Ok(api::DiskLimits::default());
    }
    let mut list = KeyValues::parse(text.as_ref())?;
    let limits = take_limits(&mut list)?;
    let Nothing {} = list.read()?;
    Ok(limits)
}

/// A list without further keys.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

fn take_size(list: &mut KeyValues, key: &str) -> Result<Option<u64>> {
    let read = |value: OsString| {
        let value = value.to_string_lossy();
        parse_size(&value).with_context(|| format!("'{key}' is a size, not '{value}'"))
    };
    list.take(key)?.map(read).transpose()
}

fn take_limits(list: &mut KeyValues) -> Result<api::DiskLimits> {
    let mut limits = api::DiskLimits::default();
    for (name, limit) in limits.by_option() {
        let mut take = |key: &str, is_bytes: bool| {
            let read = |value: OsString| {
                let value = value.to_string_lossy();
                let number = if is_bytes { parse_size(&value).ok() } else { value.parse().ok() };
                let kind = if is_bytes { "a size" } else { "a number" };
                number.with_context(|| format!("'{key}' is {kind}, not '{value}'"))
            };
            list.take(key)?.map(read).transpose()
        };
        let is_bytes = name.starts_with("bps");
        let rate = take(name, is_bytes)?;
        let max = take(&format!("{name}-max"), is_bytes)?;
        let max_length = take(&format!("{name}-max-length"), false)?;
        *limit = rate.map(|rate| api::Limit { rate, max, max_length });
        ensure!(
            limit.is_some() || max.or(max_length).is_none(),
            "'{name}-max' and '{name}-max-length' go with '{name}'"
        );
    }
    Ok(limits)
}

/// Reads `NAME=SOCKET[,queues=N][,threads=N][,poll-us=N][,serial=S][,share][,any-memory][,owner=USER][,group=GROUP]
/// [,mode=MODE]`.
///
/// # Errors
/// Names the part that is missing, unknown, repeated or malformed.
pub fn parse_vhost_user(text: &str) -> Result<VhostUserSpec> {
    let mut list = KeyValues::parse(text.as_ref())?;
    let (disk, socket) = list.take_first().context("starts with NAME=SOCKET, as in web=/run/web.sock")?;
    list.put("disk", disk);
    list.put("socket", socket);
    Ok(list.read::<api::VhostUserSpec>()?.try_into()?)
}

/// Reads `ADDRESS[,rw][,share][,insecure][,allow=CLIENT[:ro|:rw[:DISK...]],,...]`.
///
/// # Errors
/// Names the part that is unknown, repeated or malformed.
pub fn parse_nbd(text: &str) -> Result<NbdSpec> {
    let mut list = KeyValues::parse(text.as_ref())?;
    let address = list.take_head().unwrap_or_default();
    let allow =
        list.take("allow")?.map(|rights| rights.to_string_lossy().split(',').map(client_rights).collect());
    list.put("address", address);
    Ok(api::NbdSpec { allow: allow.unwrap_or_default(), ..list.read()? }.try_into()?)
}

/// Reads `DIR[,rw][,share][,allow-other]`.
///
/// # Errors
/// Names the part that is unknown, repeated or malformed.
pub fn parse_fuse(text: &str) -> Result<FuseSpec> {
    let mut list = KeyValues::parse(text.as_ref())?;
    let directory = list.take_head().unwrap_or_default();
    list.put("directory", directory);
    Ok(list.read::<api::FuseSpec>()?.try_into()?)
}

/// A client's name may have colons, as URIs do: it ends before `:ro` or `:rw`.
fn client_rights(text: &str) -> api::ClientRights {
    let parts: Vec<&str> = text.split(':').collect();
    let end = parts.iter().position(|part| matches!(*part, "ro" | "rw")).unwrap_or(parts.len());
    let disks = parts.iter().skip(end + 1).map(|&disk| disk.to_owned()).collect();
    api::ClientRights { client: parts[..end].join(":"), rw: parts.get(end) == Some(&"rw"), disks }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::time::Duration;

    use vmstrata_disk::{DetectZeroes, Limit, Limits};
    use vmstrata_export::SocketAccess;
    use vmstrata_store::CacheMode;
    use vmstrata_tier::{DurableAt, OnMissing, OnOutage};

    use super::*;

    fn error_of<T: std::fmt::Debug>(result: Result<T>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn a_disk_is_named_after_its_file() {
        let disk = parse_disk("path=/vms/web.v2.qcow2").unwrap();
        assert_eq!(
            disk,
            DiskSpec {
                path: "/vms/web.v2.qcow2".into(),
                name: "web.v2".into(),
                read_only: false,
                force: false,
                cache: CacheMode::Host,
                detect_zeroes: DetectZeroes::Off,
                subclusters: true,
                format: None,
                clone_of: None,
                agent: None,
                keep: None,
                backing: None,
                limits: Limits::default(),
                tier: None,
                replica: None,
                local: None,
            }
        );
    }

    #[test]
    fn every_key_of_a_disk_is_read() {
        let disk =
            parse_disk("path=a,,b.img,name=a b,read-only,cache=direct,format=raw,agent=/run/a.sock").unwrap();
        assert_eq!(disk.agent.as_deref(), Some(Path::new("/run/a.sock")));
        assert_eq!(disk.path, Path::new("a,b.img"));
        assert_eq!(disk.name, "a b");
        assert!(disk.read_only);
        assert_eq!(disk.cache, CacheMode::Direct);
        assert_eq!(disk.format, Some(Format::Raw));
        assert!(!parse_disk("path=a,read-only=off").unwrap().read_only);
        assert_eq!(parse_disk("path=a,cache=host,format=qcow2").unwrap().format, Some(Format::Qcow2));
        let detected = |text| parse_disk(text).unwrap().detect_zeroes;
        assert_eq!(detected("path=a,detect-zeroes=off"), DetectZeroes::Off);
        assert_eq!(detected("path=a,detect-zeroes=on"), DetectZeroes::On);
        assert_eq!(detected("path=a,detect-zeroes=unmap"), DetectZeroes::Unmap);
        assert!(parse_disk("path=a,subclusters=on").unwrap().subclusters);
        assert!(!parse_disk("path=a,subclusters=off").unwrap().subclusters);
        let backing = |text| parse_disk(text).unwrap().backing;
        assert_eq!(backing("path=a,backing=none"), Some(Vec::new()));
        assert_eq!(backing("path=a,backing=/b.raw:/c"), Some(vec!["/b.raw".into(), "/c".into()]));
        let keys = "group=guest,window=5,epochs=90m,on-missing=error:9,on-outage=stall,outage-bytes=10G,durability=repository";
        let tier = parse_disk(format!("path=a,tier=/var/lib/vmstrata,{keys}")).unwrap().tier.unwrap();
        let seconds = Duration::from_secs;
        assert_eq!((tier.dir.as_path(), tier.window), (Path::new("/var/lib/vmstrata"), Some(seconds(5))));
        assert_eq!(tier.group.as_deref(), Some("guest"));
        assert_eq!((tier.epochs, tier.on_missing), (Some(seconds(5400)), OnMissing::Error(seconds(9))));
        assert_eq!((tier.on_outage, tier.durability), (OnOutage::Stall, DurableAt::Repository));
        assert_eq!(tier.outage_bytes.map(|bytes| bytes.get()), Some(10 << 30));
        let far = "hdfs://namenode:8020/vms/web?block=1M";
        let tier = parse_disk(format!("path=a,tier=b,repository={far}")).unwrap().tier.unwrap();
        assert_eq!(tier.repository.unwrap().to_string(), far);
        let kept = parse_disk("path=a,keep=daily=7,,weekly=4").unwrap().keep;
        assert_eq!(kept.unwrap().to_string(), "daily=7,weekly=4");
    }

    #[test]
    fn a_disk_and_what_it_stands_on_may_have_any_bytes_in_their_names() {
        let spec = OsStr::from_bytes(b"path=/a,,\xff.qcow2,name=a,backing=/\xfe:/c");
        let disk = parse_disk(spec).unwrap();
        assert_eq!(disk.path.as_os_str().as_bytes(), b"/a,\xff.qcow2");
        assert_eq!(disk.backing, Some(vec![OsStr::from_bytes(b"/\xfe").into(), "/c".into()]));
        assert_eq!(parse_api_disk(spec).unwrap().path, "file:///a%2C%FF.qcow2");
    }

    #[test]
    fn limits_are_read_as_they_are_shown() {
        let text = "iops-total=1000,iops-total-max=2000,iops-total-max-length=10,bps-read=64M";
        let disk = parse_disk(format!("path=a,{text}")).unwrap();
        let iops = Limit::new(1000, Some(2000), Some(10)).unwrap();
        let bps = Limit::new(64 << 20, None, None).unwrap();
        let limits = Limits { iops_total: Some(iops), bps_read: Some(bps), ..Limits::default() };
        assert_eq!(disk.limits, limits);
        let shown = parse_limits(text).unwrap().to_string();
        assert_eq!(shown, text.replace("64M", "67108864"));
        assert_eq!(parse_limits(&shown).unwrap().to_string(), shown);
        assert_eq!(parse_limits("none").unwrap().to_string(), "");
        for (text, part) in [
            ("iops-total=many", "'iops-total' is a number, not 'many'"),
            ("bps-total=1.5G", "'bps-total' is a size"),
            ("bps-total", "'bps-total' needs a value"),
            ("iops-read-max=5", "go with 'iops-read'"),
            ("iops=5", "unknown field `iops`"),
            ("", "an empty part"),
        ] {
            let error = error_of(parse_limits(text));
            assert!(error.contains(part), "{text}: {error}");
        }
        let error = error_of(parse_disk("path=a,iops-write=10,iops-write-max=5"));
        assert!(error.contains("iops-write: 'max' is the rate of bursts"), "{error}");
    }

    #[test]
    fn a_bad_disk_says_what_is_wrong() {
        for (text, part) in [
            ("web.qcow2", "unknown field `web.qcow2`"),
            ("name=web", "missing field `path`"),
            ("path=a,readonly", "unknown field `readonly`"),
            ("path=a,cache=none", "unknown variant `none`, expected `host` or `direct`"),
            ("path=a,detect-zeroes=yes", "unknown variant `yes`"),
            ("path=a,format=vmdk", "unknown variant `vmdk`"),
            ("path=/", "is not a file"),
            ("path=a,clone=b", "a clone is made of a snapshot"),
            ("path=a,at=b/c", "is no snapshot's name"),
            ("path=a,name=b=c", "no '='"),
            ("path=a,keep=fortnightly=2", "keep: 'fortnightly=2' is no rule"),
            ("path=a,name=b\n", "no control characters"),
            ("path=a,tier=b,outage-bytes=much", "'outage-bytes' is a size, not 'much'"),
            ("path=a,tier=b,epochs=1m", "'epochs' is a time from 10m to 24h, such as 90m, not '1m'"),
            ("path=a,tier=b,on-outage=fail", "unknown variant `fail`, expected `continue` or `stall`"),
            ("path=a,durability=repository", "'durability' goes with 'tier'"),
            ("path=a,group=guest", "'group' goes with 'tier'"),
            ("path=a,tier=b,group=my guest", "'my guest' is no group's name"),
        ] {
            let error = error_of(parse_disk(text));
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(error_of(parse_disk(format!("path=a,name={}", "n".repeat(256)))).contains("at most 255"));
        parse_disk(format!("path=a,name={}", "n".repeat(255))).unwrap();
    }

    #[test]
    fn every_key_of_a_vhost_user_socket_is_read() {
        let socket =
            parse_vhost_user("web=/run/a=b.sock,queues=4,threads=2,poll-us=50,serial=WEB-1,share,any-memory,owner=qemu,group=guests,mode=620")
                .unwrap();
        assert_eq!(socket.disk, "web");
        assert_eq!(socket.socket, Path::new("/run/a=b.sock"));
        assert_eq!(socket.queues, NonZeroU16::new(4));
        assert_eq!(socket.threads, NonZeroU16::new(2));
        assert_eq!(socket.poll_us, Some(50));
        assert_eq!(socket.serial.as_deref(), Some("WEB-1"));
        assert!(socket.share && socket.any_memory);
        let access =
            SocketAccess { owner: Some("qemu".into()), group: Some("guests".into()), mode: Some(0o620) };
        assert_eq!(socket.access, access);
        let plain = parse_vhost_user("web=s").unwrap();
        assert!(plain.queues.is_none() && !plain.share && !plain.any_memory);
        assert_eq!(plain.access, SocketAccess::default());
    }

    #[test]
    fn every_key_of_an_nbd_export_is_read() {
        let export = parse_nbd("unix:/run/a=b,,c.sock,rw,share").unwrap();
        assert_eq!(export.address.to_string(), "unix:/run/a=b,c.sock");
        assert!(export.rw && export.share && !export.insecure && !parse_nbd("unix:/s").unwrap().rw);
        let export =
            parse_nbd("tcp:[::]:7,insecure,allow=CN=backup,,URI=spiffe://a/b:rw:web:db,,DNS=c:ro").unwrap();
        let rights = |client: &str, rw, disks: &[&str]| api::ClientRights {
            client: client.to_owned(),
            rw,
            disks: disks.iter().map(|&disk| disk.to_owned()).collect(),
        };
        let all = [
            rights("CN=backup", false, &[]),
            rights("URI=spiffe://a/b", true, &["web", "db"]),
            rights("DNS=c", false, &[]),
        ];
        assert!(export.insecure && export.allow == all, "{export:?}");
        for (text, part) in [
            ("/run/nbd.sock", "is no NBD address"),
            ("unix:/s,readwrite", "unknown field `readwrite`"),
            ("unix:/s,allow=backup", "'backup' names no client"),
            ("unix:/s,rw,allow=CN=backup", "'rw' is for all clients"),
        ] {
            let error = error_of(parse_nbd(text));
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn every_key_of_a_mount_is_read() {
        let mount = parse_fuse("/run/a,,b,rw,share,allow-other").unwrap();
        assert_eq!(mount.directory.to_str(), Some("/run/a,b"));
        assert!(mount.rw && mount.share && mount.allow_other && !parse_fuse("/d").unwrap().rw);
        for (text, part) in [("", "an empty part"), ("/d,ro", "unknown field `ro`")] {
            let error = error_of(parse_fuse(text));
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_bad_vhost_user_socket_says_what_is_wrong() {
        for (text, part) in [
            ("web", "NAME=SOCKET"),
            ("web=", "needs a value"),
            ("web=s,queues=0", "'queues' is at least 1"),
            ("web=s,queues=65536", "expected u16"),
            ("web=s,poll-us=x", "'poll-us' is a number"),
            ("web=s,serial=123456789012345678901", "carries 20"),
            ("web=s,mode=888", "octal digits up to 666"),
            ("web=s,group=", "'group' needs a value"),
            ("web=s,read-only", "unknown field `read-only`"),
        ] {
            let error = error_of(parse_vhost_user(text));
            assert!(error.contains(part), "{text}: {error}");
        }
        let long = "s".repeat(108);
        assert!(error_of(parse_vhost_user(&format!("web={long}"))).contains("108 bytes"));
    }
}
