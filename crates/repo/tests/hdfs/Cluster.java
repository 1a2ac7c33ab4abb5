import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.BlockLocation;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.hadoop.hdfs.DistributedFileSystem;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSCluster.DataNodeProperties;
import org.apache.hadoop.hdfs.protocol.DatanodeID;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction;
import org.apache.hadoop.hdfs.server.datanode.DataNode;

/**
 * A NameNode and DataNodes for tests, in one process: {@code java Cluster.java DIR DATANODES}. Prints {@code ready PORT}, then obeys
 * commands on its input, one a line, each answered by one line. Ends with its input, so it outlives no test.
 */
public class Cluster {
    private static final List<DataNodeProperties> stopped = new ArrayList<>();
    private static final long SLOW_LEASE_MS = 600_000;
    private static final List<DatanodeID> unnoticed = new ArrayList<>();

    public static void main(String[] args) throws Exception {
        Configuration conf = new Configuration();
        // DataNodes report a block a moment after the client has their answer. A client that closes the file before would wait for
        // half a second. HDFS lets it pass where the block has more than one copy.
        conf.setInt("dfs.namenode.file.close.num-committed-allowed", 1);
        MiniDFSCluster cluster = new MiniDFSCluster.Builder(conf, new File(args[0]))
            .numDataNodes(Integer.parseInt(args[1]))
            .build();
        cluster.waitActive();
        // On a slow machine nobody takes a process for gone that is only late.
        cluster.setLeasePeriod(SLOW_LEASE_MS, 2 * SLOW_LEASE_MS);
        // Anyone may write, as who runs the tests is not always who runs this.
        cluster.getFileSystem().setPermission(new Path("/"), new FsPermission((short) 0777));
        System.out.println("ready " + cluster.getNameNodePort());
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            System.out.println(obey(cluster, line.split(" ")));
        }
        // Nothing of it is needed again: no orderly shutdown.
        Runtime.getRuntime().halt(0);
    }

    private static String obey(MiniDFSCluster cluster, String[] words) {
        try {
            switch (words[0]) {
                case "mkdir":
                    cluster.getFileSystem().mkdirs(new Path(words[1]));
                    return "done";
                case "replicate":
                    cluster.getFileSystem().setReplication(new Path(words[1]), Short.parseShort(words[2]));
                    return "done";
                case "blocks":
                    return blocks(cluster.getFileSystem(), new Path(words[1]));
                // Whether others may take over what was not renewed this millisecond.
                case "expire":
                    cluster.setLeasePeriod(words[1].equals("now") ? 1 : SLOW_LEASE_MS, 2 * SLOW_LEASE_MS);
                    return "done";
                case "safe-mode":
                    cluster.getFileSystem().setSafeMode(
                        words[1].equals("on") ? SafeModeAction.SAFEMODE_ENTER : SafeModeAction.SAFEMODE_LEAVE);
                    return "done";
                case "stop-datanode":
                    for (DataNode node : cluster.getDataNodes()) {
                        if (node.getDatanodeId().getXferAddr().equals(words[1])) {
                            unnoticed.add(node.getDatanodeId());
                        }
                    }
                    stopped.add(cluster.stopDataNode(words[1]));
                    return "done";
                // The NameNode finds out by itself after ten minutes.
                case "notice-stopped":
                    for (DatanodeID node : unnoticed) {
                        cluster.setDataNodeDead(node);
                    }
                    unnoticed.clear();
                    return "done";
                case "start-datanodes":
                    for (DataNodeProperties node : stopped) {
                        cluster.restartDataNode(node, true);
                    }
                    stopped.clear();
                    unnoticed.clear();
                    cluster.waitActive();
                    return "done";
                case "stop-namenode":
                    cluster.shutdownNameNode(0);
                    return "done";
                case "start-namenode":
                    cluster.restartNameNode(0, true);
                    return "done";
                default:
                    return "unknown " + words[0];
            }
        } catch (Exception e) {
            return "failed " + e.toString().replace('\n', ' ');
        }
    }

    /** For each block of a file its length and the DataNodes that have it: {@code LENGTH,NODE,NODE LENGTH,NODE}. */
    private static String blocks(DistributedFileSystem fs, Path path) throws Exception {
        List<String> blocks = new ArrayList<>();
        for (BlockLocation block : fs.getFileBlockLocations(path, 0, Long.MAX_VALUE)) {
            List<String> words = new ArrayList<>(List.of(Long.toString(block.getLength())));
            words.addAll(List.of(block.getNames()));
            blocks.add(String.join(",", words));
        }
        return String.join(" ", blocks);
    }
}
